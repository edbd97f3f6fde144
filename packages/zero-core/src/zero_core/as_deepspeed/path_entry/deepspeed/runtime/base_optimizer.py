"""The class of engine.optimizer."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedOptimizer": "zero_core.as_deepspeed.optimizer:DeepSpeedOptimizer",
    "ZeROOptimizer": "zero_core.as_deepspeed.optimizer:ZeROOptimizer",
}
__getattr__, __dir__ = names(__name__, _FOUND)
