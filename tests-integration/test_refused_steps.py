"""A step that is refused because ranks differ says what became of its gradients, and what it says to do works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import LR, Run, deviation

from zero_comm import run_ranks
from zero_partition import PartitionError

DROPPED = (
    "the gradients of this step are dropped: call engine.zero_grad() on every rank and continue with the next batch"
)
KEPT = "The gradients of this step are kept: call engine.zero_grad() on every rank and continue with the next batch, or"


def other_rate(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 2 * LR


def written_gradient(engine: Any) -> None:
    weight = engine.module.blocks[0].up.weight
    weight.grad = torch.ones_like(weight)


def gradient_in_place(engine: Any) -> None:
    engine.module.blocks[0].up.weight.grad.mul_(2)


def discards(engine: Any) -> None:
    engine.optimizer.zero_grad()


def weight(engine: Any) -> None:
    weight = engine.module.blocks[0].up.weight
    weight.data = torch.ones(weight.shape, dtype=weight.dtype)


def backward(engine: Any, number: int) -> None:
    engine.backward(sum(engine(*zoo.batch(number, 0, dist.get_rank(), dist.get_world_size()))))


def refused(stage: int, changes: tuple[Callable[[Any], None], ...], again: bool) -> tuple[list[str], Any]:
    """The last rank alone makes each change before its step. Return what the steps said, and the weights after the next
    batches; ``again``: the step is called again first."""
    engine = training.start(Run(), stage)
    texts = []
    for number, change in enumerate(changes):
        backward(engine, 2 * number)
        if dist.get_rank() == dist.get_world_size() - 1:
            change(engine)
        with pytest.raises(PartitionError) as error:
            engine.step()
        texts.append(str(error.value))
        engine.optimizer.param_groups[0]["lr"] = LR
        if again:
            engine.step()
        else:
            engine.zero_grad()
        backward(engine, 2 * number + 1)
        engine.step()
    return texts, training.weights(engine)


def plain(batches: range) -> dict[str, torch.Tensor]:
    """One process, which takes steps with these batches."""
    model = zoo.build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for number in batches:
        sum(model(*zoo.batch(number, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(2, 0), (2, 3), *(pytest.param(n, stage, marks=pytest.mark.soak) for n in (2, 3) for stage in range(4))],
)
def test_a_step_that_ranks_cannot_share_is_skipped_as_told(world_size: int, stage: int) -> None:
    changes = (other_rate, written_gradient, discards, weight, *([] if stage else [gradient_in_place]))
    expected = plain(range(1, 2 * len(changes), 2))
    for texts, weights in run_ranks(refused, world_size, stage, changes, False):
        for change, text in zip(changes, texts, strict=True):
            assert (KEPT if change is weight else DROPPED) in text, text
        assert deviation(weights, expected) <= 1e-12


@pytest.mark.parametrize("stage", [1, 3, *(pytest.param(s, marks=pytest.mark.soak) for s in (0, 2))])
def test_a_step_refused_for_an_edit_can_be_called_again(stage: int) -> None:
    for (text,), weights in run_ranks(refused, 2, stage, (weight,), True):
        assert "engine.step() again" in text
        assert deviation(weights, plain(range(2))) <= 1e-12
