"""Sharded parameters."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedZeRoOffload": "zero_core.as_deepspeed.offload:ParameterOffload",
    "GatheredParameters": "zero_core.as_deepspeed.construction:GatheredParameters",
    "Init": "zero_core.as_deepspeed.construction:Init",
    "TiledLinear": "zero_partition:TiledLinear",
    "ZeroParamStatus": "zero_core.as_deepspeed.parameters:ZeroParamStatus",
    "ZeroParamType": "zero_core.as_deepspeed.parameters:ZeroParamType",
    "config": "deepspeed.runtime.zero.config",
    "partition_parameters": "deepspeed.runtime.zero.partition_parameters",
    "register_external_parameter": "zero_core.as_deepspeed.construction:register_external_parameter",
    "unregister_external_parameter": "zero_partition:unregister_external_parameter",
    "unwrap_model_for_generation": "zero_core.as_deepspeed.construction:unwrap_model_for_generation",
    "utils": "deepspeed.runtime.zero.utils",
}
_REFUSED = {
    "DeepSpeedTensorOverride": "nothing in torch is replaced, so there is nothing to choose",
    "TiledLinearReturnBias": "use TiledLinear and add the bias",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
