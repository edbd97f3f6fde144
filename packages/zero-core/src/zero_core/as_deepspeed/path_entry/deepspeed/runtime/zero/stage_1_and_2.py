"""Stages 1 and 2."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedZeroOptimizer": "zero_core.as_deepspeed.optimizer:ZeROOptimizer",
}
__getattr__, __dir__ = names(__name__, _FOUND)
