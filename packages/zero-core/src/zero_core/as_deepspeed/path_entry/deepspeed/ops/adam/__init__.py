"""Adam."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedCPUAdam": "zero_core.as_deepspeed.cpu_optimizers:DeepSpeedCPUAdam",
    "FusedAdam": "zero_core.as_deepspeed.cpu_optimizers:FusedAdam",
}
__getattr__, __dir__ = names(__name__, _FOUND)
