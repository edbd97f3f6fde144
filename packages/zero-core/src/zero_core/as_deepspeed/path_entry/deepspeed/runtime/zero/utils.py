"""Errors and questions."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "ZeRORuntimeException": "zero_partition:PartitionError",
    "is_zero_param": "zero_core.as_deepspeed.helpers:is_zero_param",
    "is_zero_supported_optimizer": "zero_core.as_deepspeed.helpers:is_zero_supported_optimizer",
}
__getattr__, __dir__ = names(__name__, _FOUND)
