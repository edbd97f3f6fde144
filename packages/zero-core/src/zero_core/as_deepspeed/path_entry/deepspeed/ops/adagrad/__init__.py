"""Adagrad."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedCPUAdagrad": "zero_core.as_deepspeed.cpu_optimizers:DeepSpeedCPUAdagrad",
}
__getattr__, __dir__ = names(__name__, _FOUND)
