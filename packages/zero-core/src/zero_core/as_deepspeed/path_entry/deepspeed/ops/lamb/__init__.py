"""LAMB."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "FusedLamb": "zero_core.optimizers.lamb:Lamb",
}
__getattr__, __dir__ = names(__name__, _FOUND)
