"""A parameter that only some ranks freeze is refused by name before any weight changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from engine_cases import adamw, build, distance, plain, start, train, weights

from zero_comm import run_ranks
from zero_partition import PartitionError


def frozen_on_one(stage: int, on: bool) -> tuple[str, float, dict[str, torch.Tensor]]:
    """What the step says after rank 0 alone has frozen a parameter (``on``) or has thawed it, what it changed, and the
    weights after all have done what it says and two steps were made."""
    engine = start(stage)
    bias = engine.module.blocks[0].bias
    if not on:
        bias.requires_grad_(False)
    if dist.get_rank() == 0:
        bias.requires_grad_(not on)
    before = weights(engine)
    with pytest.raises(PartitionError) as refused:
        train(engine, 0, 1)
    changed = distance(weights(engine), before)
    bias.requires_grad_()
    engine.zero_grad()
    dist.barrier()
    train(engine, 0, 2)
    trained = weights(engine)
    engine.destroy()
    return str(refused.value), changed, trained


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_refused_on_every_rank_and_training_goes_on(stage: int, on: bool) -> None:
    model = build()
    plain(model, adamw(model), 0, 2)
    for text, changed, trained in run_ranks(frozen_on_one, 2, stage, on):
        trained_on, frozen_on = ([1], [0]) if on else ([0], [1])
        assert f"'blocks.0.bias' requires gradients on ranks {trained_on} and none on ranks {frozen_on}" in text
        assert changed == 0 and distance(trained, weights(model)) <= 1e-12


def frozen_on_all(stage: int) -> dict[str, torch.Tensor]:
    engine = start(stage)
    engine.module.blocks[0].bias.requires_grad_(False)
    train(engine, 0, 2)
    trained = weights(engine)
    engine.destroy()
    return trained


@pytest.mark.parametrize("stage", [0, 3])
def test_one_that_all_ranks_freeze_stays_as_it_is(stage: int) -> None:
    model = build()
    model.blocks[0].bias.requires_grad_(False)
    plain(model, adamw(model), 0, 2)
    for trained in run_ranks(frozen_on_all, 2, stage):
        assert distance(trained, weights(model)) <= 1e-12


def frozen_within_an_accumulation(stage: int) -> str:
    engine = start(stage, gradient_accumulation_steps=2)
    train(engine, 0, 1)
    if dist.get_rank() == 1:
        engine.module.blocks[0].bias.requires_grad_(False)
    with pytest.raises(PartitionError) as refused:
        train(engine, 1, 2)
    engine.destroy()
    return str(refused.value)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_is_refused_too_where_an_earlier_micro_batch_had_its_gradient(stage: int) -> None:
    for text in run_ranks(frozen_within_an_accumulation, 2, stage):
        assert "'blocks.0.bias' requires gradients on ranks [0] and none on ranks [1]" in text
