"""Rules about which ranks share what."""

from __future__ import annotations

from collections.abc import Iterator

from zero_core.config.errors import Problem
from zero_core.config.keys import ConfigFile

_SECONDARY = "zero_optimization.zero_hpz_partition_size"
_COPIES = "zero_optimization.mics_shard_size"


def sharing_problems(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    """One problem for every group of ranks that cannot be made, or not together with another key."""
    if config.zero_optimization.stage >= 3 and config.zero_optimization.zero_hpz_partition_size > 1:
        yield from _secondary(config, world_size)
    if config.zero_optimization.mics_shard_size != -1:
        yield from _copies(config, world_size)


def _secondary(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    size, per_node = config.zero_optimization.zero_hpz_partition_size, config.comm.ranks_per_node
    yield from _divides(_SECONDARY, size, world_size)
    if per_node is not None and per_node % size and world_size % size == 0:
        action = "or backward gathers would leave the node"
        yield Problem(_SECONDARY, f"expected a divisor of comm.ranks_per_node, {per_node}", str(size), action=action)
    if config.zero_optimization.offload_param.device != "none":
        action = "secondary shards stay on the device, where offload_param leaves no parameters: choose one of the two"
        yield Problem(_SECONDARY, "expected 1 with zero_optimization.offload_param", str(size), action=action)


def _copies(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    zero = config.zero_optimization
    size = zero.mics_shard_size
    if size < 1:
        yield Problem(_COPIES, "expected a number of ranks, or -1 for all of them", str(size))
        return
    yield from _divides(_COPIES, size, world_size)
    if zero.stage == 0:
        yield Problem(_COPIES, "expected stage 1, 2 or 3 with it", "stage 0", action="at stage 0 nothing is sharded")
    if zero.stage >= 3 and zero.zero_hpz_partition_size > 1:
        action = "gathers of a copy stay among its ranks already"
        yield Problem(_SECONDARY, f"expected 1 with {_COPIES}", str(zero.zero_hpz_partition_size), action=action)


def _divides(path: str, size: int, world_size: int) -> Iterator[Problem]:
    if world_size % size:
        possible = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        yield Problem(path, f"expected a divisor of the number of ranks, {world_size} ({possible})", str(size))
