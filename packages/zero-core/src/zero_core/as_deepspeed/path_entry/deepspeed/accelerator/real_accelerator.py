"""The device by DeepSpeed's names."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "get_accelerator": "zero_core.as_deepspeed.accelerator:get_accelerator",
}
_REFUSED = {
    "set_accelerator": "set the variable DS_ACCELERATOR",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
