"""The configuration's helpers."""

from zero_core.as_deepspeed.naming import names

_FOUND: dict[str, str] = {}
_REFUSED = {
    "DeepSpeedConfigModel": "use zero_core.Config",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
