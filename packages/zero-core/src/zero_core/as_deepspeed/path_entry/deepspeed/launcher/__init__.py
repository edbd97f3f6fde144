"""The launcher."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "runner": "deepspeed.launcher.runner",
}
__getattr__, __dir__ = names(__name__, _FOUND)
