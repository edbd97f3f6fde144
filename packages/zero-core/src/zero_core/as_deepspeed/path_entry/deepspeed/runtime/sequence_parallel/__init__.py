"""Not available: train long sequences with activation checkpointing and offload."""

from zero_core.as_deepspeed.naming import refuse_module

refuse_module(__name__, "train long sequences with activation checkpointing and offload")
