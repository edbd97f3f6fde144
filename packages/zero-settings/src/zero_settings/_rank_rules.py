"""Rules between keys and the number of ranks: process groups, sequence parallelism and virtual ranks.

With V virtual ranks (`deterministic.across_world_sizes`) every number of ranks that divides V trains bitwise equally.
``world_size`` is the number of ranks. A function yields a `Problem` for each rule that the configuration breaks,
nothing if it breaks none."""

from __future__ import annotations

from collections.abc import Iterator

from zero_settings._parallel_keys import Deterministic
from zero_settings.errors import Problem
from zero_settings.keys import ConfigFile

_SECONDARY_SIZE = "zero_optimization.zero_hpz_partition_size"
_REPLICA_SIZE = "zero_optimization.mics_shard_size"
_SEQUENCE_SIZE = "sequence_parallel_size"
_VIRTUAL_RANKS = "deterministic.across_world_sizes"
_REDUCED_BY_THEMSELVES = ("lamb", "onebitadam", "onebitlamb", "zerooneadam")


def group_problems(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    """Yield the problems of the groups of ranks that share secondary shards or a replica: sizes that other keys or
    ``world_size`` rule out."""
    if config.zero_optimization.stage >= 3 and config.zero_optimization.zero_hpz_partition_size > 1:
        yield from _secondary_shard_problems(config, world_size)
    if config.zero_optimization.mics_shard_size != -1:
        yield from _replica_problems(config, world_size)


def _secondary_shard_problems(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    """Yield the problems of `zero_hpz_partition_size`, the number of ranks that share secondary shards; expected to be
    more than 1."""
    size, per_node = config.zero_optimization.zero_hpz_partition_size, config.comm.ranks_per_node
    yield from _divisor_problems(_SECONDARY_SIZE, size, world_size)
    if per_node is not None and per_node % size and world_size % size == 0:
        action = "or backward gathers would leave the node"
        yield Problem(
            _SECONDARY_SIZE, f"expected a divisor of comm.ranks_per_node, {per_node}", str(size), action=action
        )
    if config.zero_optimization.offload_param.device != "none":
        action = "secondary shards stay on the device, where offload_param leaves no parameters: choose one of the two"
        yield Problem(_SECONDARY_SIZE, "expected 1 with zero_optimization.offload_param", str(size), action=action)


def _replica_problems(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    """Yield the problems of `mics_shard_size`, the number of ranks that a replica is sharded over; expected to be other
    than -1."""
    zero = config.zero_optimization
    size = zero.mics_shard_size
    if size < 1:
        yield Problem(_REPLICA_SIZE, "expected a number of ranks, or -1 for all of them", str(size))
        return
    yield from _divisor_problems(_REPLICA_SIZE, size, world_size)
    if zero.stage == 0:
        yield Problem(
            _REPLICA_SIZE, "expected stage 1, 2 or 3 with it", "stage 0", action="at stage 0 nothing is sharded"
        )
    if zero.stage >= 3 and zero.zero_hpz_partition_size > 1:
        action = "gathers within a replica stay on its ranks already"
        yield Problem(
            _SECONDARY_SIZE, f"expected 1 with {_REPLICA_SIZE}", str(zero.zero_hpz_partition_size), action=action
        )


def _divisor_problems(path: str, size: int, world_size: int) -> Iterator[Problem]:
    """Yield a problem if ``size``, the value at ``path``, does not divide ``world_size``."""
    if world_size % size:
        possible = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        yield Problem(path, f"expected a divisor of the number of ranks, {world_size} ({possible})", str(size))


def virtual_ranks(config: ConfigFile) -> int:
    """Return the number of virtual ranks, the value of `deterministic.across_world_sizes`; 0 if there are none, also
    where `deterministic` is just true."""
    found = config.deterministic
    return found.across_world_sizes if isinstance(found, Deterministic) else 0


def rank_problems(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    """Yield the problems that have to be solved before batch sizes can be resolved.

    They are those of `sequence_parallel_size`, which has to divide ``world_size`` and be 1 with virtual ranks, and, if
    it is 1, those of virtual ranks (see `_virtual_rank_problems`)."""
    size = config.sequence_parallel_size
    yield from _divisor_problems(_SEQUENCE_SIZE, size, world_size)
    if size > 1 and virtual_ranks(config):
        action = "ranks that share a sequence add up in their own order: choose one of the two"
        yield Problem(_SEQUENCE_SIZE, f"expected 1 with {_VIRTUAL_RANKS}", str(size), action=action)
    elif size == 1:
        yield from _virtual_rank_problems(config, world_size)


def _virtual_rank_problems(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    """Yield the problems of virtual ranks: their number has to be a power of two and a multiple of ``world_size``, and
    other keys have to be compatible with them. Nothing without virtual ranks."""
    ranks = virtual_ranks(config)
    if not ranks:
        return
    if ranks & (ranks - 1):
        near = f"{1 << ranks.bit_length() - 1} or {1 << ranks.bit_length()}"
        yield Problem(
            _VIRTUAL_RANKS, "expected a power of two, for a binary tree", str(ranks), action=f"{near} would do"
        )
        return
    if ranks % world_size:
        possible = ", ".join(str(1 << n) for n in range(ranks.bit_length()))
        yield Problem(_VIRTUAL_RANKS, f"expected a number of ranks among {possible}", f"{world_size} ranks")
        return
    steps = config.gradient_accumulation_steps
    if steps is not None and steps != ranks // world_size:
        expected = f"expected {ranks} virtual ranks / {world_size} ranks = {ranks // world_size} micro-batches"
        yield Problem("gradient_accumulation_steps", expected, str(steps), action="remove it: it follows")
    yield from _incompatible_with_virtual_ranks(config)


def _incompatible_with_virtual_ranks(config: ConfigFile) -> Iterator[Problem]:
    """Yield a problem for each feature that is switched on and whose sums depend on the number of ranks, or that is
    untested with virtual ranks."""
    zero, together = config.zero_optimization, f"with {_VIRTUAL_RANKS}"
    for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(zero, key):
            action = "codes depend on shards"
            yield Problem(f"zero_optimization.{key}", f"expected false {together}", "true", action=action)
    if zero.mics_shard_size != -1:
        yield Problem("zero_optimization.mics_shard_size", f"expected -1 {together}", str(zero.mics_shard_size))
    if zero.zero_hpz_partition_size > 1:
        got = str(zero.zero_hpz_partition_size)
        yield Problem("zero_optimization.zero_hpz_partition_size", f"expected 1 {together}", got)
    if config.offload.delayed_update:
        yield Problem("offload.delayed_update", f"expected false {together}", "true")
    if config.torch_autocast.enabled:
        yield Problem("torch_autocast.enabled", f"expected false {together}", "true", action="use bf16 or fp16")
    if config.optimizer is not None and config.optimizer.type in _REDUCED_BY_THEMSELVES:
        action = "it adds up over the ranks by itself: use adamw"
        yield Problem("optimizer.type", f"expected another optimizer {together}", config.optimizer.type, action=action)
