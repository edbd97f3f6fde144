"""Adam."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "FusedAdam": "zero_core.as_deepspeed.cpu_optimizers:FusedAdam",
}
__getattr__, __dir__ = names(__name__, _FOUND)
