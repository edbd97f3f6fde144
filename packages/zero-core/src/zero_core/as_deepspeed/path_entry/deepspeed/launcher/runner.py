"""The launcher."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DEEPSPEED_ENVIRONMENT_NAME": "zero_core.as_deepspeed.command:DEEPSPEED_ENVIRONMENT_NAME",
    "main": "zero_core.as_deepspeed.command:main",
}
__getattr__, __dir__ = names(__name__, _FOUND)
