"""What drives gathers."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedZeRoOffload": "zero_core.as_deepspeed.offload:ParameterOffload",
}
__getattr__, __dir__ = names(__name__, _FOUND)
