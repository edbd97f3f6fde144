"""Checkpoints."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "clone_tensors_for_torch_save": "zero_core.as_deepspeed.helpers:clone_tensors_for_torch_save",
}
__getattr__, __dir__ = names(__name__, _FOUND)
