"""Adam."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedCPUAdam": "zero_core.as_deepspeed.cpu_optimizers:DeepSpeedCPUAdam",
}
__getattr__, __dir__ = names(__name__, _FOUND)
