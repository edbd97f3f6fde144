"""Bytes of parameters, gradients, masters and moments that one rank holds, by tier. A unit is the parameters that are
gathered and reduced together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .errors import at_least_one, one_of
from .setup import STAGES, Setup, Tier, unit_sizes

KINDS = ("parameters", "secondary shards", "gradients", "masters", "moments")


class StateRow(NamedTuple):
    """Bytes of one kind of model state that one rank holds on one tier."""

    kind: str
    tier: Tier
    nbytes: int


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
    precision: a float32 master and two moments. Activations, buffers and fragmentation come on top.
    Raises `PlanError` for a stage other than 0 to 3, or counts below 1.
    """
    at_least_one(total_params=total_params, world_size=world_size)
    one_of("stage", stage, STAGES)
    full = sharded = 0
    for nbytes, sharded_from in ((optimizer_bytes, 1), (gradient_bytes, 2), (parameter_bytes, 3)):
        if stage >= sharded_from:
            sharded += nbytes
        else:
            full += nbytes
    return full * total_params - (-sharded * total_params // world_size)


def largest_model(memory: float, *, stage: int, world_size: int) -> float:
    """Return the number of parameters of the largest model whose states fit into ``memory`` bytes per rank (Rajbhandari
    et al. 2020, arXiv 1910.02054v3, table 2, left half).

    The inverse of `model_states_per_rank` for Adam in mixed precision, with the same errors. With model parallelism of
    degree M the model may be M times as large.
    """
    return memory * 2**40 / model_states_per_rank(2**40, stage=stage, world_size=world_size)


def model_states(units: int | tuple[int, ...] | list[int], setup: Setup, rank: int = 0) -> tuple[StateRow, ...]:
    """Return the bytes of every kind of model state that one rank holds, by tier; kinds in the order of `KINDS`.

    ``units``: elements of each unit, as every unit is padded to equal shards; or the parameters of the model, as one
    unit. ``rank``: the padding at a unit's end has no moments, so later ranks may hold fewer than rank 0. The stages
    shard as in Rajbhandari et al. 2020 (arXiv 1910.02054v3, section 5). With an offloaded optimizer its states and,
    from stage 2, the gradients leave the device (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, section 4.1);
    gradients are on the host also if the states are on NVMe. The secondary shards of a node's ranks hold the parameters
    once per node (Wang et al. 2023, ZeRO++, arXiv 2306.10209, section 3.2). Gathered units come on top:
    `zero_plan.working_bytes`.
    """
    sizes = unit_sizes(units)
    kept = setup.bytes
    shard = sum(setup.shard(size) for size in sizes)
    full = setup.world_size * shard
    owned = sum(setup.owned(size, rank) for size in sizes) if setup.stage >= 1 else sum(sizes)
    optimizer = shard if setup.stage >= 1 else full
    waiting: Tier = "device" if setup.stage < 2 or setup.offload_optimizer == "device" else "host"
    rows = [
        StateRow("parameters", setup.offload_parameters, kept.parameter * (shard if setup.stage >= 3 else full)),
        StateRow("gradients", waiting, kept.gradient * (shard if setup.stage >= 2 else full)),
        StateRow("masters", setup.offload_optimizer, kept.master * optimizer),
        StateRow("moments", setup.offload_optimizer, kept.moments * owned),
    ]
    if setup.hpz:
        secondary = sum(setup.shard(size, setup.per_node) for size in sizes)
        rows.insert(1, StateRow("secondary shards", "device", kept.parameter * secondary))
    return tuple(rows)


def by_tier(rows: Iterable[StateRow]) -> dict[Tier, int]:
    """Return the sum of the bytes of ``rows`` by tier; tiers without rows are absent."""
    found: dict[Tier, int] = {}
    for row in rows:
        found[row.tier] = found.get(row.tier, 0) + row.nbytes
    return found


def published_table(total_params: int, world_sizes: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (stage, world size, bytes per rank) as table 1 of the ZeRO paper has them, stage 0 first. Raises the errors
    of `model_states_per_rank`.
    """
    world_sizes = tuple(world_sizes)
    for stage in STAGES:
        for ranks in world_sizes:
            yield stage, ranks, model_states_per_rank(total_params, stage=stage, world_size=ranks)
