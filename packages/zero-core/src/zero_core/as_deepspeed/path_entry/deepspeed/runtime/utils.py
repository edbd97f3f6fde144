"""Helpers."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DummyOptim": "zero_core.as_deepspeed.helpers:DummyOptim",
    "move_to_device": "zero_core.as_deepspeed.helpers:move_to_device",
    "see_memory_usage": "zero_core.as_deepspeed.helpers:see_memory_usage",
    "set_random_seed": "zero_core.as_deepspeed.helpers:set_random_seed",
}
_REFUSED = {
    "clip_grad_norm_": "use engine.clip_grad_norm_",
    "get_global_norm": "use engine.get_global_grad_norm()",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
