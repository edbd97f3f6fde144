"""Not available: train the model with ZeRO stage 3, which needs no stages."""

from zero_core.as_deepspeed.naming import refuse_module

refuse_module(__name__, "train the model with ZeRO stage 3, which needs no stages")
