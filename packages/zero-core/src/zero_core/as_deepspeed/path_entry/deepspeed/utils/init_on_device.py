"""Models without memory."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "OnDevice": "zero_core.as_deepspeed.helpers:OnDevice",
}
__getattr__, __dir__ = names(__name__, _FOUND)
