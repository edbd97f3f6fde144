"""Lion."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedCPULion": "zero_core.as_deepspeed.cpu_optimizers:DeepSpeedCPULion",
    "FusedLion": "zero_core.as_deepspeed.cpu_optimizers:FusedLion",
}
__getattr__, __dir__ = names(__name__, _FOUND)
