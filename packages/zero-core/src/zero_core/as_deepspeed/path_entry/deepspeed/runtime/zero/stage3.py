"""Stage 3."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedZeroOptimizer_Stage3": "zero_core.as_deepspeed.optimizer:ZeROOptimizer",
    "estimate_zero3_model_states_mem_needs_all_cold": "zero_core.as_deepspeed.estimators:zero3_cold",
    "estimate_zero3_model_states_mem_needs_all_live": "zero_core.as_deepspeed.estimators:zero3_live",
    "unwrap_model_for_generation": "zero_core.as_deepspeed.construction:unwrap_model_for_generation",
}
__getattr__, __dir__ = names(__name__, _FOUND)
