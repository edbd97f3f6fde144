"""Optimizers and file I/O."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "__compatible_ops__": "zero_core.as_deepspeed.report:COMPATIBLE",
    "adagrad": "deepspeed.ops.adagrad",
    "adam": "deepspeed.ops.adam",
    "aio": "deepspeed.ops.aio",
    "lamb": "deepspeed.ops.lamb",
    "lion": "deepspeed.ops.lion",
    "op_builder": "deepspeed.ops.op_builder",
}
_REFUSED = {
    "DeepSpeedTransformerConfig": "use torch.nn.functional.scaled_dot_product_attention",
    "DeepSpeedTransformerLayer": "use torch.nn.functional.scaled_dot_product_attention",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
