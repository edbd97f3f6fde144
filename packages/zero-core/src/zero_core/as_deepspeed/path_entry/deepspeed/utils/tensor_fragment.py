"""Values of sharded parameters."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
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
}
__getattr__, __dir__ = names(__name__, _FOUND)
