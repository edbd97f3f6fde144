"""The engine."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedEngine": "zero_core.as_deepspeed.engine:DeepSpeedEngine",
}
__getattr__, __dir__ = names(__name__, _FOUND)
