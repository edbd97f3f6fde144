"""Recomputation."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "checkpointing": "zero_core.checkpointing",
}
__getattr__, __dir__ = names(__name__, _FOUND)
