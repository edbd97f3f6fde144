"""Helpers of DeepSpeed by their names."""

from deepspeed.utils.init_on_device import _FOUND as _ON_DEVICE
from deepspeed.utils.logging import _FOUND as _LOGGING
from deepspeed.utils.tensor_fragment import _FOUND as _FRAGMENTS
from deepspeed.utils.z3_leaf_module import _FOUND as _LEAVES
from deepspeed.utils.z3_leaf_module import _REFUSED
from zero_core.as_deepspeed.naming import names

_FOUND = {
    **_ON_DEVICE,
    **_LOGGING,
    **_FRAGMENTS,
    **_LEAVES,
    "RepeatingLoader": "zero_core.loading:RepeatingLoader",
    "groups": "deepspeed.utils.groups",
    "instrument_w_nvtx": "zero_core.as_deepspeed.helpers:unchanged",
    "is_initialized": "torch.distributed:is_initialized",
    "logging": "deepspeed.utils.logging",
    "zero_to_fp32": "deepspeed.utils.zero_to_fp32",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
