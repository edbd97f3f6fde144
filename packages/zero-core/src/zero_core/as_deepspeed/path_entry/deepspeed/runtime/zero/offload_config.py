"""The offload sections."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_core.config._zero_keys:OffloadOptimizer",
    "DeepSpeedZeroOffloadParamConfig": "zero_core.config._zero_keys:OffloadParam",
    "OffloadDeviceEnum": "zero_core.as_deepspeed.words:OffloadDeviceEnum",
    "OffloadStateTypeEnum": "zero_core.as_deepspeed.words:OffloadStateTypeEnum",
}
__getattr__, __dir__ = names(__name__, _FOUND)
