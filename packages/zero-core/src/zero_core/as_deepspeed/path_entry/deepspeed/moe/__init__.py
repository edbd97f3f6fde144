"""Not available: train the experts as plain modules with ZeRO."""

from zero_core.as_deepspeed.naming import refuse_module

refuse_module(__name__, "train the experts as plain modules with ZeRO")
