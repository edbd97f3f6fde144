"""Parts of the engine by DeepSpeed's module names."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "activation_checkpointing": "deepspeed.runtime.activation_checkpointing",
    "base_optimizer": "deepspeed.runtime.base_optimizer",
    "config": "deepspeed.runtime.config",
    "config_utils": "deepspeed.runtime.config_utils",
    "dataloader": "deepspeed.runtime.dataloader",
    "engine": "deepspeed.runtime.engine",
    "lr_schedules": "deepspeed.runtime.lr_schedules",
    "utils": "deepspeed.runtime.utils",
    "zero": "deepspeed.runtime.zero",
}
__getattr__, __dir__ = names(__name__, _FOUND)
