"""Recomputation."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "checkpoint": "zero_core.checkpointing:checkpoint",
    "configure": "zero_core.checkpointing:configure",
    "is_configured": "zero_core.checkpointing:is_configured",
    "non_reentrant_checkpoint": "zero_core.checkpointing:non_reentrant_checkpoint",
    "reset": "zero_core.checkpointing:reset",
}
__getattr__, __dir__ = names(__name__, _FOUND)
