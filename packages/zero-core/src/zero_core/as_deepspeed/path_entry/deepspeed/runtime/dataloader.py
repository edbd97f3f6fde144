"""Loaders."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedDataLoader": "zero_core.loading:RankLoader",
    "RepeatingLoader": "zero_core.loading:RepeatingLoader",
}
__getattr__, __dir__ = names(__name__, _FOUND)
