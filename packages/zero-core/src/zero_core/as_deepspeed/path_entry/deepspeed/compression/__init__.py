"""Not available: compress the exported weights with torchao."""

from zero_core.as_deepspeed.naming import refuse_module

refuse_module(__name__, "compress the exported weights with torchao")
