"""The unit that stays in memory from the end of forward to the start of backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from partition_models import Stack, cut, gathered_bytes, make, tokens

from zero_comm import run_ranks
from zero_partition import Partition, PartitionError, ReleasedParameterError, ShardedOptimizer, gathered


def trained(parts: Partition, model: Stack, steps: int) -> ShardedOptimizer:
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    for step in range(steps):
        model(tokens(step)).backward()
        optimizer.step()
    return optimizer


def counted() -> tuple[int, int]:
    model = make(blocks=4)
    parts = cut(model, 3)
    optimizer = trained(parts, model, 2)
    before = parts.groups.gather.ledger.calls("gather")
    model(tokens(2)).backward()
    optimizer.step()
    return parts.groups.gather.ledger.calls("gather") - before, sum(unit.releasable for unit in parts.units)


def test_a_step_gathers_the_last_unit_of_forward_once_and_the_others_twice() -> None:
    for gathers, units in run_ranks(counted, 2):
        assert gathers == 2 * units - 1


def gradients(between: str, stage: int) -> list[torch.Tensor]:
    """Full gradients of a step in which something happens ``between`` forward and backward."""
    model = make(blocks=2)
    parts = cut(model, stage)
    optimizer = trained(parts, model, 2)
    loss = model(tokens(7))
    if between == "evaluation":
        with torch.no_grad():
            model(tokens(8))
    elif between == "another forward":
        model(tokens(9))
    elif between == "evaluation on rank 1 only":
        with torch.set_grad_enabled(torch.distributed.get_rank() == 0):
            model(tokens(8))
    elif between == "reading":
        with gathered(parts, model.parameters()):
            assert all(bool(p.isfinite().all()) for p in model.parameters())
    loss.backward()
    optimizer.step()
    with gathered(parts, model.parameters()):
        return [p.detach().clone() for p in model.parameters()]


BETWEEN = ("nothing", "evaluation", "another forward", "evaluation on rank 1 only", "reading")


@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_runs_between_forward_and_backward_the_step_is_that_of_stage_2(between: str) -> None:
    expected = run_ranks(gradients, 2, between, 2)
    for rank, result in enumerate(run_ranks(gradients, 2, between, 3)):
        assert all(map(torch.equal, result, expected[rank]))


def written(how: str) -> tuple[str, int]:
    """Name of the error of a backward before which the weights of the kept unit were written."""
    model = make(blocks=2)
    parts = cut(model, 3)
    trained(parts, model, 2)
    loss = model(tokens(7))
    kept = gathered_bytes(parts)
    try:
        if how == "gathered":
            with gathered(parts, model.parameters(), modifier_rank=0), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        else:
            model.head.weight.data.mul_(2)
        loss.backward()
    except (PartitionError, ReleasedParameterError) as error:
        return type(error).__name__, kept
    return "", kept


@pytest.mark.parametrize("how", ["gathered", "in place"])
def test_weights_that_are_written_between_forward_and_backward_are_refused(how: str) -> None:
    for error, kept in run_ranks(written, 2, how):
        assert error and kept > 0


def left(stage: int) -> dict[str, int]:
    model = make(blocks=2)
    parts = cut(model, stage)
    optimizer = trained(parts, model, 2)
    found: dict[str, Any] = {}
    with torch.no_grad():
        model(tokens(1))
    found["evaluation"] = gathered_bytes(parts)
    model(tokens(1))
    optimizer.step()
    found["a step without backward"] = gathered_bytes(parts)
    model(tokens(1))
    parts.close(unshard=False)
    found["close"] = gathered_bytes(parts)
    return found


def test_nothing_is_kept_after_an_evaluation_a_step_or_the_end() -> None:
    for found in run_ranks(left, 2, 3):
        assert set(found.values()) == {0}, found


class Shifted(Stack):
    """A stack to whose result rank 0 alone adds the weight of a module that nobody calls. Autograd needs no value for
    that gradient, so it comes before the unit is gathered in backward."""

    def __init__(self) -> None:
        super().__init__(2)
        self.shift = torch.nn.LayerNorm(7, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result = super().forward(tokens)
        return result + self.shift.weight.sum() if torch.distributed.get_rank() == 0 else result


def shifted(stage: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Shifted().double()
    parts = cut(model, stage)
    trained(parts, model, 5)
    with gathered(parts, model.parameters()):
        return [p.detach().clone() for p in model.parameters()]


def test_a_gradient_that_comes_before_the_gather_of_the_unit_that_is_kept_leaves_it_kept() -> None:
    expected = run_ranks(shifted, 2, 2)
    for rank, result in enumerate(run_ranks(shifted, 2, 3)):
        assert all(map(torch.equal, result, expected[rank]))
