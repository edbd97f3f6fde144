"""The compass: every stage and world size follows the one-process run (DESIGN.md, numerics are a contract).

Awkward models are in test_matrix.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import training
import zoo
from training import Run

from zero_comm import run_ranks

STAGES, WORLD_SIZES = (0, 1, 2, 3), (1, 2, 3)
SOAK = pytest.mark.soak
ORACLE = 1e-12
LENGTHS = [8, pytest.param(50, marks=SOAK)]
"""Steps. What reaches a weight in a wrong way is far above the bound after a few; rounding adds up over fifty."""


@functools.cache
def one_process(run: Run) -> dict[str, torch.Tensor]:
    return training.plain(run)


def some_of(chosen: set[tuple[object, ...]], *axes: tuple[object, ...]) -> list[Any]:
    """The product of the axes, of which those that are not chosen are for the soak."""
    return [pytest.param(*case, marks=() if case in chosen else SOAK) for case in itertools.product(*axes)]


def check(run: Run, stage: int, world_size: int, bound: float = ORACLE) -> None:
    weights = run_ranks(training.ranks, world_size, run, stage)[0]
    assert training.deviation(weights, one_process(run)) <= bound


# Stages 1 and 2 are bitwise equal to 0, below.
@pytest.mark.parametrize(
    ("stage", "world_size", "accumulation", "clip"),
    some_of(
        {(0, 1, 1, 0.0), (0, 2, 3, 0.1), (0, 3, 1, 0.1), (3, 1, 3, 0.1), (3, 2, 1, 0.0), (3, 3, 3, 0.1)},
        *(STAGES, WORLD_SIZES, (1, 3), (0.0, 0.1)),
    ),
)
@pytest.mark.parametrize("steps", LENGTHS)
def test_transformer_with_tied_head_follows_the_oracle(
    stage: int, world_size: int, accumulation: int, clip: float, steps: int
) -> None:
    check(Run(steps=steps, accumulation=accumulation, clip=clip), stage, world_size)


def test_fifty_steps_follow_the_oracle() -> None:
    check(Run(clip=0.1), 3, 2)


@pytest.mark.parametrize(
    ("stage", "world_size", "accumulation"), some_of({(0, 1, 2), (3, 3, 2)}, STAGES, (1, 3), (1, 2))
)
@pytest.mark.parametrize("steps", LENGTHS)
def test_two_backwards_in_one_micro_batch_follow_the_oracle(
    stage: int, world_size: int, accumulation: int, steps: int
) -> None:
    check(Run("two losses", steps, backwards=2, accumulation=accumulation, clip=0.1), stage, world_size)


def plain_backward(run: Run, stage: int) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    engine = training.start(run, stage)
    for step in range(run.steps):
        sum(engine(*zoo.batch(step, 0, dist.get_rank(), dist.get_world_size()))).backward()
        engine.step()
    return training.weights(engine)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("steps", (4, pytest.param(50, marks=SOAK)))
def test_loss_backward_without_the_engine_follows_the_oracle(stage: int, steps: int) -> None:
    run = Run("recomputed", steps, clip=0.1)
    weights = run_ranks(plain_backward, 2, run, stage)[0]
    assert training.deviation(weights, one_process(run)) <= ORACLE


# -- bitwise ---------------------------------------------------------------------------------------------------------


@functools.cache
def trained_bits(run: Run, stage: int, world_size: int) -> dict[str, bytes]:
    return training.bits(run_ranks(training.ranks, world_size, run, stage)[0])


DTYPES_AND_WORLD_SIZES = [
    *(("fp32", 1), ("bf16", 2), ("fp32", 3)),
    *(pytest.param(*case, marks=SOAK) for case in (("bf16", 1), ("fp32", 2), ("bf16", 3))),
]
BITS = 3
"""Steps of the bitwise runs: one bit that differs stays."""


@pytest.mark.parametrize(("dtype", "world_size"), DTYPES_AND_WORLD_SIZES)
def test_stages_are_bitwise_equal_at_one_backward_per_step(dtype: str, world_size: int) -> None:
    run = Run("frozen and unused", steps=BITS, clip=0.1, dtype=dtype)
    for stage in STAGES[1:]:
        assert trained_bits(run, stage, world_size) == trained_bits(run, 0, world_size)


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_stages_pair_up_bitwise_with_accumulation(dtype: str) -> None:
    run = Run(steps=BITS, clip=0.1, accumulation=3, dtype=dtype)
    assert trained_bits(run, 0, 2) == trained_bits(run, 1, 2)
    assert trained_bits(run, 2, 2) == trained_bits(run, 3, 2)


@pytest.mark.parametrize("dtype", (pytest.param("fp32", marks=SOAK), "bf16"))
def test_reduce_each_micro_batch_makes_all_stages_bitwise_equal(dtype: str) -> None:
    run = Run(steps=BITS, clip=0.1, accumulation=3, dtype=dtype, reduce_each=True)
    for stage in STAGES[1:]:
        assert trained_bits(run, stage, 3) == trained_bits(run, 0, 3)


# -- fp32 against DDP ------------------------------------------------------------------------------------------------


def ddp(run: Run) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    model = zoo.build(run.variant, torch.float32)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    for step in range(run.steps):
        sum(wrapped(*zoo.batch(step, 0, dist.get_rank(), dist.get_world_size()))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", (2, pytest.param(3, marks=SOAK)))
@pytest.mark.parametrize("steps", LENGTHS)
def test_fp32_deviates_at_most_twice_as_much_as_ddp(world_size: int, steps: int) -> None:
    run = Run(steps=steps, dtype="fp32")
    exact = one_process(run._replace(dtype="fp64"))
    allowed = max(1e-6, 2 * training.deviation(run_ranks(ddp, world_size, run)[0], exact))
    for stage in (0, 3) if steps < 50 else STAGES:  # 1 and 2 have the bits of 0, above
        weights = run_ranks(training.ranks, world_size, run, stage)[0]
        assert training.deviation(weights, exact) <= allowed
