"""Helpers of DeepSpeed by their names."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "OnDevice": "zero_core.as_deepspeed.helpers:OnDevice",
    "RepeatingLoader": "zero_core.loading:RepeatingLoader",
    "get_z3_leaf_modules": "zero_core.as_deepspeed.leaf_modules:get_z3_leaf_modules",
    "groups": "deepspeed.utils.groups",
    "instrument_w_nvtx": "zero_core.as_deepspeed.helpers:unchanged",
    "is_initialized": "torch.distributed:is_initialized",
    "log_dist": "zero_core.as_deepspeed.logging_names:log_dist",
    "logger": "zero_core.as_deepspeed.logging_names:logger",
    "logging": "deepspeed.utils.logging",
    "safe_get_full_fp32_param": "zero_core.as_deepspeed.fragments:safe_get_full_fp32_param",
    "safe_get_full_grad": "zero_core.as_deepspeed.fragments:safe_get_full_grad",
    "safe_get_full_optimizer_state": "zero_core.as_deepspeed.fragments:safe_get_full_optimizer_state",
    "safe_get_local_fp32_param": "zero_core.as_deepspeed.fragments:safe_get_local_fp32_param",
    "safe_get_local_grad": "zero_core.as_deepspeed.fragments:safe_get_local_grad",
    "safe_get_local_optimizer_state": "zero_core.as_deepspeed.fragments:safe_get_local_optimizer_state",
    "safe_set_full_fp32_param": "zero_core.as_deepspeed.fragments:safe_set_full_fp32_param",
    "safe_set_full_grad": "zero_core.as_deepspeed.fragments:safe_set_full_grad",
    "safe_set_full_optimizer_state": "zero_core.as_deepspeed.fragments:safe_set_full_optimizer_state",
    "safe_set_local_fp32_param": "zero_core.as_deepspeed.fragments:safe_set_local_fp32_param",
    "safe_set_local_grad": "zero_core.as_deepspeed.fragments:safe_set_local_grad",
    "safe_set_local_optimizer_state": "zero_core.as_deepspeed.fragments:safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized": "zero_core.as_deepspeed.fragments:safe_update_full_grad_vectorized",
    "set_log_level_from_string": "zero_core.as_deepspeed.logging_names:set_log_level_from_string",
    "set_z3_leaf_module": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_module",
    "set_z3_leaf_modules": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix": "zero_core.as_deepspeed.leaf_modules:set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules": "zero_core.as_deepspeed.leaf_modules:unset_z3_leaf_modules",
    "z3_leaf_module": "zero_core.as_deepspeed.leaf_modules:z3_leaf_module",
    "zero_to_fp32": "deepspeed.utils.zero_to_fp32",
}
__getattr__, __dir__ = names(__name__, _FOUND)
