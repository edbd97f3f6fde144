"""Not available: use the section flops_profiler of the configuration, or torch.utils.flop_counter."""

from zero_core.as_deepspeed.naming import refuse_module

refuse_module(__name__, "use the section flops_profiler of the configuration, or torch.utils.flop_counter")
