"""Stages 1 and 2."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedZeroOptimizer": "zero_core.as_deepspeed.optimizer:ZeROOptimizer",
    "estimate_zero2_model_states_mem_needs_all_cold": "zero_core.as_deepspeed.estimators:zero2_cold",
    "estimate_zero2_model_states_mem_needs_all_live": "zero_core.as_deepspeed.estimators:zero2_live",
}
__getattr__, __dir__ = names(__name__, _FOUND)
