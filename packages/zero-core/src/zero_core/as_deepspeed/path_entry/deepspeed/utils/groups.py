"""Process groups: data parallelism alone."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "_get_data_parallel_group": "zero_core.as_deepspeed.groups:get_data_parallel_group",
    "_get_data_parallel_rank": "zero_core.as_deepspeed.groups:get_data_parallel_rank",
    "_get_data_parallel_world_size": "zero_core.as_deepspeed.groups:get_data_parallel_world_size",
    "_get_expert_data_parallel_group": "zero_core.as_deepspeed.groups:no_group",
    "_get_expert_parallel_group": "zero_core.as_deepspeed.groups:no_group",
    "_get_model_parallel_world_size": "zero_core.as_deepspeed.groups:one",
    "_get_sequence_data_parallel_group": "zero_core.as_deepspeed.groups:get_data_parallel_group",
    "_get_sequence_data_parallel_rank": "zero_core.as_deepspeed.groups:get_data_parallel_rank",
    "_get_sequence_data_parallel_world_size": "zero_core.as_deepspeed.groups:get_data_parallel_world_size",
    "_get_sequence_parallel_group": "zero_core.as_deepspeed.groups:no_group",
    "_get_sequence_parallel_rank": "zero_core.as_deepspeed.groups:zero",
    "_get_sequence_parallel_world_size": "zero_core.as_deepspeed.groups:one",
    "get_data_parallel_group": "zero_core.as_deepspeed.groups:get_data_parallel_group",
    "get_data_parallel_rank": "zero_core.as_deepspeed.groups:get_data_parallel_rank",
    "get_data_parallel_world_size": "zero_core.as_deepspeed.groups:get_data_parallel_world_size",
    "get_model_parallel_group": "zero_core.as_deepspeed.groups:no_group",
    "get_model_parallel_rank": "zero_core.as_deepspeed.groups:zero",
    "get_model_parallel_world_size": "zero_core.as_deepspeed.groups:one",
    "get_tensor_model_parallel_group": "zero_core.as_deepspeed.groups:no_group",
    "get_tensor_model_parallel_rank": "zero_core.as_deepspeed.groups:zero",
    "get_tensor_model_parallel_world_size": "zero_core.as_deepspeed.groups:one",
}
_REFUSED = {
    "initialize": "there are no expert groups to set up",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
