"""The bytes of parameters, gradients and optimizer state on one rank, as published."""

from __future__ import annotations

from zero_core.errors import UsageError
from zero_core.estimate._checks import at_least_one


def model_states_per_rank(
    total_params: int,
    *,
    stage: int,
    world_size: int,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> int:
    """Return the bytes of model states that one rank holds (Rajbhandari et al. 2020, arXiv 1910.02054v3, section 5).

    With Ψ parameters, K optimizer bytes and N ranks, and 2 bytes for a parameter and a gradient: (4 + K)Ψ at stage 0,
    4Ψ + KΨ/N at stage 1, 2Ψ + (2 + K)Ψ/N at stage 2, (4 + K)Ψ/N at stage 3; rounded up. K is 12 for Adam in mixed
    precision: a float32 master copy and two moments. Activations, buffers and fragmentation come on top.
    Raises `UsageError` for a stage other than 0 to 3, or counts below 1.
    """
    at_least_one(total_params=total_params, world_size=world_size)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"stage: expected 0, 1, 2 or 3, got {stage!r}")
    whole = sharded = 0
    for nbytes, sharded_from in ((optimizer_bytes, 1), (gradient_bytes, 2), (parameter_bytes, 3)):
        if stage >= sharded_from:
            sharded += nbytes
        else:
            whole += nbytes
    return whole * total_params - (-sharded * total_params // world_size)
