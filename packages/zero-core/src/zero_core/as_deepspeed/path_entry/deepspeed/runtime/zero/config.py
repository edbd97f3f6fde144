"""The section zero_optimization."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedZeroConfig": "zero_core.config._zero_keys:ZeroOptimization",
    "OffloadDeviceEnum": "zero_core.as_deepspeed.words:OffloadDeviceEnum",
    "ZeroStageEnum": "zero_core.as_deepspeed.words:ZeroStageEnum",
}
__getattr__, __dir__ = names(__name__, _FOUND)
