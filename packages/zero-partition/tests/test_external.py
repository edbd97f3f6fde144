"""Modules that use what they do not own, modules that are gathered whole, and ranks that call forward differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from partition_models import Stack, cut, groups, make, tokens
from torch import nn

from zero_comm import CommError, run_ranks
from zero_partition import (
    PartitionError,
    PartitionOptions,
    ShardedOptimizer,
    UnitLimits,
    UnitState,
    full_parameter,
    partition,
    register_external_parameter,
    set_leaf_modules,
    unregister_external_parameter,
)
from zero_precision import PrecisionPolicy


class Holder(nn.Module):
    """Uses a weight that it holds in a list, where no module attribute shows it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.held = [weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.held[0].t()


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Sequential(nn.Linear(6, 6))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(2))
        self.holder = Holder(self.owner[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.holder(x).square().mean()


def borrow(register: str) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = Borrowing().double()
    torch.manual_seed(0)
    model = Borrowing().double()
    if register == "before":
        register_external_parameter(model.holder, model.owner[0].weight)
        register_external_parameter(model.holder, model.owner[0].weight)
    if register == "taken back":
        register_external_parameter(model.holder, model.owner[0].weight)
        unregister_external_parameter(model.holder, model.owner[0].weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(inner, parts)
    if register == "after":
        register_external_parameter(model.holder, model.owner[0].weight)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    x = torch.ones(3, 6, dtype=torch.float64)
    losses = []
    for _ in range(3):
        loss = model(x)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        reference(x).backward()
        expected.step()
        expected.zero_grad()
    pairs = [(full_parameter(parts, p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    released = all(unit.state is UnitState.RELEASED for unit in parts.units)
    return {"losses": losses, "deviation": max(float((a - b).abs().max()) for a, b in pairs), "released": released}


@pytest.mark.parametrize("register", ["before", "after"])
def test_a_registered_parameter_is_there_when_its_user_runs(register: str) -> None:
    for result in run_ranks(borrow, 2, register):
        assert result["deviation"] < 1e-12 and result["released"]


def test_without_registration_the_parameter_comes_when_it_is_used() -> None:
    for result in run_ranks(borrow, 2, "taken back"):
        assert result["deviation"] < 1e-12 and result["released"]


def units_of(marked: str) -> dict[str, list[str]]:
    model = make()
    limits = UnitLimits(max_numel=50, min_numel=1)
    if marked == "class":
        assert len(set_leaf_modules(model, [nn.Sequential])) == 3
    elif marked == "names":
        set_leaf_modules(model, ["blocks.1", "Sequential", "torch.nn.modules.container.Sequential"])
    parts = cut(model, 3, limits=limits)
    model(tokens()).backward()
    return {unit.name: unit.names for unit in parts.units}


@pytest.mark.parametrize("marked", ["class", "names"])
def test_leaf_modules_are_gathered_as_a_whole_whatever_their_size(marked: str) -> None:
    opened, whole = run_ranks(units_of, 2, "")[0], run_ranks(units_of, 2, marked)[0]
    assert not any(len(names) == 4 for names in opened.values())
    assert [len(names) for name, names in whole.items() if name.startswith("blocks")] == [4, 4, 4]


def test_a_leaf_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="no module of the model is 'Nothing'"):
        set_leaf_modules(make(), ["Nothing"])


def different_lengths(open_synced: bool) -> list[float] | str:
    model: Stack = make()
    options = PartitionOptions(
        stage=3, policy=PrecisionPolicy.full(torch.float64), limits=UnitLimits(min_numel=1), prefetch_numel=100
    )
    parts = partition(model, groups(), options)
    values = []
    rank = dist.get_rank()
    try:
        for turn in range(2):
            with torch.no_grad():
                if not open_synced:
                    values += [float(model(tokens(n))) for n in range(1 + 2 * rank)]
                    parts.runtime.agree("end", "", None)
                    continue
                with parts.runtime.synced():
                    values += [float(model(tokens(n))) for n in range(1 + 2 * (rank if turn else 2 - rank))]
    except CommError as error:
        return type(error).__name__
    released = all(unit.state is UnitState.RELEASED for unit in parts.units)
    return values if released else "something stayed gathered"


def test_ranks_may_call_forward_differently_often_inside_synced() -> None:
    model = make()
    alone = [float(model(tokens(n)).detach()) for n in range(5)]
    for rank, values in enumerate(run_ranks(different_lengths, 3, True)):
        assert values == alone[: 1 + 2 * (2 - rank)] + alone[: 1 + 2 * rank]


def test_outside_synced_a_different_number_of_calls_is_refused_by_name() -> None:
    assert run_ranks(different_lengths, 2, False) == ["DesyncError"] * 2


def backward_inside() -> str:
    model = make()
    parts = cut(model, 3)
    try:
        with parts.runtime.synced():
            model(tokens()).backward()
    except PartitionError as error:
        return str(error)
    return "accepted"


def test_backward_inside_synced_is_refused() -> None:
    assert all("leave it first" in message for message in run_ranks(backward_inside, 2))
