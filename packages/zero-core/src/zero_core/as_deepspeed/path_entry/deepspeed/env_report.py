"""The command ds_report."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "main": "zero_core.as_deepspeed.report:main",
}
__getattr__, __dir__ = names(__name__, _FOUND)
