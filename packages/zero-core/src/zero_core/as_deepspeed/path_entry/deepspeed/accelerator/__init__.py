"""The device by DeepSpeed's names."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedAccelerator": "zero_core.as_deepspeed.accelerator:Accelerator",
    "get_accelerator": "zero_core.as_deepspeed.accelerator:get_accelerator",
    "real_accelerator": "deepspeed.accelerator.real_accelerator",
}
_REFUSED = {
    "set_accelerator": "set the variable DS_ACCELERATOR",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
