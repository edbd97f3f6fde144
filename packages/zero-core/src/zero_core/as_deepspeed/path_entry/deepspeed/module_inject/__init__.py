"""Not available: shard the parameters with ZeRO stage 3 instead."""

from zero_core.as_deepspeed.naming import refuse_module

refuse_module(__name__, "shard the parameters with ZeRO stage 3 instead")
