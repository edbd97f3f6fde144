"""The batch-size triangle: train = micro x accumulation x data-parallel ranks.

Ranks that share a sequence count as one: ``world_size`` here is the number of ranks with samples of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from zero_settings._base import LARGEST_INTEGER
from zero_settings.errors import ConfigError, Problem

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


RULE, KEEP, SCALE = "elastic.batch_size", "keep_global_batch", "scale"


class ResolvedBatch(NamedTuple):
    """Batch sizes: samples per optimizer step over all ranks (`train`), samples per forward and rank (`micro`), and
    forwards per optimizer step (`steps`).
    """

    train: int
    micro: int
    steps: int


def resolve(
    train: int | None, micro: int | None, steps: int | None, world_size: int, *, any_auto: bool
) -> ResolvedBatch:
    """Return the three batch sizes (see `ResolvedBatch`), deriving those that are None. Raises `ConfigError` when those
    given contradict each other.

    If two are given, the third follows. If only train or only micro is given, there is one accumulation step. If
    neither train nor micro is given, micro is 1 if `any_auto` (one of the two was written as "auto"), otherwise a
    `ConfigError` is raised."""
    if train is None:
        if micro is None and not any_auto:
            got = "neither" if steps is None else f"only {STEPS} = {steps}"
            action = f"set {MICRO}, the samples of one forward on one rank"
            raise ConfigError(Problem(MICRO, f"expected {MICRO} or {TRAIN}", got, action=action))
        micro = 1 if micro is None else micro
        steps = 1 if steps is None else steps
        train = micro * steps * world_size
        if train > LARGEST_INTEGER:
            factors = f"{MICRO} x {STEPS} x data-parallel ranks = {micro} x {steps} x {world_size}"
            expected = f"expected {factors} of at most 64 bits"
            raise ConfigError(Problem(TRAIN, expected, str(train), action=f"lower {MICRO} or {STEPS}"))
        return ResolvedBatch(train, micro, steps)
    if micro is None:
        steps = 1 if steps is None else steps
        micro = train // (steps * world_size)
        if micro * steps * world_size != train or micro == 0:
            raise ConfigError(_not_divisible(train, {STEPS: steps}, world_size))
    elif steps is None:
        steps = train // (micro * world_size)
        if micro * steps * world_size != train or steps == 0:
            raise ConfigError(_not_divisible(train, {MICRO: micro}, world_size))
    product = micro * steps * world_size
    if product != train:
        expected = f"expected {MICRO} x {STEPS} x data-parallel ranks = {micro} x {steps} x {world_size} = {product}"
        raise ConfigError(Problem(TRAIN, expected, str(train), action="remove one of the three, or correct it"))
    return ResolvedBatch(train, micro, steps)


def resolve_by_rule(
    rule: str, train: int | None, micro: int | None, steps: int | None, world_size: int
) -> ResolvedBatch:
    """Return the batch sizes at ``world_size`` ranks by ``rule``, the value of `elastic.batch_size`.

    "keep_global_batch" keeps ``train`` and ``micro`` and derives the accumulation; ``steps`` is ignored. "scale" keeps
    ``micro`` and ``steps`` (1 if None) and derives train; ``train`` is ignored. Raises `ConfigError` if a size to keep
    is None, or if train is no multiple of micro x ranks."""
    needed = {MICRO: micro} if rule == SCALE else {TRAIN: train, MICRO: micro}
    missing = [name for name, size in needed.items() if size is None]
    if missing or micro is None:
        expected = f'expected a number with {RULE} = "{rule}", which keeps it at any number of ranks'
        raise ConfigError(*(Problem(name, expected, "nothing") for name in missing))
    if rule == SCALE:
        return resolve(None, micro, steps, world_size, any_auto=False)
    return resolve(train, micro, None, world_size, any_auto=False)


def _not_divisible(train: int, other: dict[str, int], world_size: int) -> Problem:
    """Return the problem of a ``train`` batch size that is no multiple of another size times ``world_size``; its advice
    names the nearest multiples.

    ``other``: one item, the key of that other size and its value."""
    ((name, value),) = other.items()
    step = value * world_size
    expected = f"expected a multiple of {name} x data-parallel ranks = {value} x {world_size} = {step}"
    near = sorted({max(train // step, 1) * step, -(-train // step) * step})
    return Problem(TRAIN, expected, str(train), action=f"{' or '.join(map(str, near))} would do")
