"""Which optimizers may run on fragments of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from zero_partition import PartitionError
from zero_partition.elementwise import must_be_whole


class SignDescent(Optimizer):
    """Elementwise, and unknown to anybody."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["age"] = state.get("age", 0) + 1
                    p.sub_(p.grad.sign(), alpha=group["lr"] / state["age"])


class NormedDescent(SignDescent):
    """Divides by the norm of the whole gradient of a parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class RowDescent(SignDescent):
    """Works on rows and fails on anything that has none."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rows, _ = p.shape
                p.sub_(p.grad / rows, alpha=group["lr"])


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 4))]


@pytest.mark.parametrize(
    "kind", ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
def test_torchs_elementwise_optimizers_run_on_fragments(kind: str) -> None:
    assert must_be_whole(getattr(torch.optim, kind)(parameters(), lr=1e-3), sharded=True) is False


def test_the_probe_accepts_an_unknown_elementwise_optimizer_and_leaves_no_trace() -> None:
    given = parameters()
    before = given[0].detach().clone()
    optimizer = SignDescent(given)
    assert must_be_whole(optimizer, sharded=True) is False
    assert torch.equal(given[0], before) and not optimizer.state and optimizer.param_groups[0]["params"] == given


@pytest.mark.parametrize("make", [NormedDescent, RowDescent, torch.optim.Adafactor, torch.optim.Muon])
def test_what_looks_at_whole_matrices_is_refused_by_name_on_shards_and_runs_whole_at_stage_0(
    make: Callable[[Any], Optimizer],
) -> None:
    optimizer = make(parameters())
    with pytest.raises(PartitionError, match=f"{type(optimizer).__name__} "):
        must_be_whole(optimizer, sharded=True)
    assert must_be_whole(optimizer, sharded=False) is True


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_what_no_engine_can_run_is_refused_by_name_at_every_stage(
    make: Callable[[Any], Optimizer], sharded: bool
) -> None:
    with pytest.raises(PartitionError, match=f"{make.__name__} cannot run in an engine"):  # type: ignore[attr-defined]
        must_be_whole(make(parameters()), sharded=sharded)
