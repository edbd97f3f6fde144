"""Sharded parameters."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "GatheredParameters": "zero_core.as_deepspeed.construction:GatheredParameters",
    "Init": "zero_core.as_deepspeed.construction:Init",
    "ZeroParamStatus": "zero_core.as_deepspeed.parameters:ZeroParamStatus",
    "ZeroParamType": "zero_core.as_deepspeed.parameters:ZeroParamType",
    "_orig_torch_arange": "torch:arange",
    "get_accelerator": "zero_core.as_deepspeed.accelerator:get_accelerator",
    "is_zero_param": "zero_core.as_deepspeed.helpers:is_zero_param",
    "register_external_parameter": "zero_core.as_deepspeed.construction:register_external_parameter",
    "unregister_external_parameter": "zero_partition:unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor": "zero_core.as_deepspeed.helpers:unchanged",
}
__getattr__, __dir__ = names(__name__, _FOUND)
