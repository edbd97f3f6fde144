"""Not available: call the model itself, or a serving engine on the exported weights."""

from zero_core.as_deepspeed.naming import refuse_module

refuse_module(__name__, "call the model itself, or a serving engine on the exported weights")
