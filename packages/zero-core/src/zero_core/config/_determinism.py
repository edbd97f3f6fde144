"""Rules of bitwise reproducibility across world sizes."""

from __future__ import annotations

from collections.abc import Iterator

from zero_core.config._parallel_keys import Deterministic
from zero_core.config.errors import Problem
from zero_core.config.keys import ConfigFile

_KEY = "deterministic.across_world_sizes"
_REDUCED_BY_THEMSELVES = ("lamb", "onebitadam", "onebitlamb", "zerooneadam")


def virtual_ranks(config: ConfigFile) -> int:
    """Return how many virtual ranks share a step; 0 when steps belong to the ranks."""
    found = config.deterministic
    return found.across_world_sizes if isinstance(found, Deterministic) else 0


def virtual_rank_problems(config: ConfigFile, world_size: int) -> Iterator[Problem]:
    """One problem for everything that does not go with virtual ranks, or with so many."""
    ranks = virtual_ranks(config)
    if not ranks:
        return
    if ranks & (ranks - 1):
        near = f"{1 << ranks.bit_length() - 1} or {1 << ranks.bit_length()}"
        yield Problem(_KEY, "expected a power of two, for a binary tree", str(ranks), action=f"{near} would do")
        return
    if ranks % world_size:
        possible = ", ".join(str(1 << n) for n in range(ranks.bit_length()))
        yield Problem(_KEY, f"expected a number of ranks among {possible}", f"{world_size} ranks")
        return
    steps = config.gradient_accumulation_steps
    if steps is not None and steps != ranks // world_size:
        expected = f"expected {ranks} virtual ranks / {world_size} ranks = {ranks // world_size} micro-batches"
        yield Problem("gradient_accumulation_steps", expected, str(steps), action="remove it: it follows")
    yield from _other_orders(config)


def _other_orders(config: ConfigFile) -> Iterator[Problem]:
    """What adds up in an order that depends on the number of ranks, or was never tested with virtual ranks."""
    zero, together = config.zero_optimization, f"with {_KEY}"
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
