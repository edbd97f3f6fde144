"""The names of DeepSpeed, answered by zero_core.as_deepspeed."""

from zero_core.as_deepspeed.naming import names

__version__ = "0.19.8"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = "zero_core"

_FOUND = {
    "DeepSpeedConfig": "zero_core.as_deepspeed.configuration:DeepSpeedConfig",
    "DeepSpeedConfigError": "zero_core.config:ConfigError",
    "DeepSpeedDataLoader": "zero_core.loading:RankLoader",
    "DeepSpeedEngine": "zero_core.as_deepspeed.engine:DeepSpeedEngine",
    "DeepSpeedOptimizer": "zero_core.as_deepspeed.optimizer:DeepSpeedOptimizer",
    "OnDevice": "zero_core.as_deepspeed.helpers:OnDevice",
    "TORCH_DISTRIBUTED_DEFAULT_PORT": "deepspeed.constants:TORCH_DISTRIBUTED_DEFAULT_PORT",
    "accelerator": "deepspeed.accelerator",
    "add_config_arguments": "zero_core.as_deepspeed.engine:add_config_arguments",
    "checkpoint": "deepspeed.checkpoint",
    "checkpointing": "zero_core.checkpointing",
    "comm": "deepspeed.comm",
    "constants": "deepspeed.constants",
    "dist": "deepspeed.comm",
    "env_report": "deepspeed.env_report",
    "get_accelerator": "zero_core.as_deepspeed.accelerator:get_accelerator",
    "git_version_info": "deepspeed.git_version_info",
    "init_distributed": "zero_core.as_deepspeed.communication:init_distributed",
    "initialize": "zero_core.as_deepspeed.engine:initialize",
    "launcher": "deepspeed.launcher",
    "log_dist": "zero_core.as_deepspeed.logging_names:log_dist",
    "logger": "zero_core.as_deepspeed.logging_names:logger",
    "ops": "deepspeed.ops",
    "runtime": "deepspeed.runtime",
    "utils": "deepspeed.utils",
    "zero": "deepspeed.runtime.zero",
}
_REFUSED = {
    "DeepSpeedHybridEngine": "use the engine of initialize, and unwrap_model_for_generation to generate",
    "DeepSpeedInferenceConfig": "call the model itself, or a serving engine on the exported weights",
    "DeepSpeedTransformerConfig": "use torch.nn.functional.scaled_dot_product_attention",
    "DeepSpeedTransformerLayer": "use torch.nn.functional.scaled_dot_product_attention",
    "InferenceEngine": "call the model itself, or a serving engine on the exported weights",
    "PipelineEngine": "train the model with ZeRO stage 3, which needs no stages",
    "PipelineModule": "train the model with ZeRO stage 3, which needs no stages",
    "default_inference_config": "call the model itself, or a serving engine on the exported weights",
    "init_inference": "call the model itself, or a serving engine on the exported weights",
    "replace_transformer_layer": "call the model itself, or a serving engine on the exported weights",
    "set_autotp_mode": "shard the parameters with ZeRO stage 3 instead",
    "tp_model_init": "shard the parameters with ZeRO stage 3 instead",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
