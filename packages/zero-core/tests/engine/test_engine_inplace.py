"""What backward needs and user code has written in place since is refused at every stage, as in plain torch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError


class Overwriting(nn.Module):
    """Writes an activation in place that backward needs, where ``again`` says so."""

    hidden: weakref.ref[torch.Tensor]

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.again = nn.Linear(6, 6), nn.Linear(6, 3), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).exp()
        self.hidden = weakref.ref(hidden)
        found: torch.Tensor = self.second(hidden)
        if self.again:
            hidden.mul_(2)
        return found


def engine_of(model: nn.Module, stage: int) -> zero_core.Engine:
    zero = {"stage": stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]


def refusals(stage: int) -> list[str]:
    said = []
    for again in (False, True):
        model = Overwriting(again=again)
        engine = engine_of(model, stage)
        try:
            engine.backward(engine(torch.ones(2, 6)).sum())
            engine.step()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        engine.destroy(unshard=False)
    return said


def outlives_its_graph(stage: int) -> bool:
    """Return whether a result that its own operation saves is alive after a forward whose loss was dropped."""
    model = Overwriting(again=False)
    engine = engine_of(model, stage)
    engine(torch.ones(2, 6))
    gc.collect()
    lives = model.hidden() is not None
    engine.destroy(unshard=False)
    return lives


def refused_without_hooks(stage: int) -> str:
    model = Overwriting(again=False)
    engine = engine_of(model, stage)
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            engine(torch.ones(2, 6))
    except PartitionError as error:
        return str(error)
    finally:
        engine.destroy(unshard=False)
    return ""


def test_a_forward_without_saved_tensor_hooks_is_refused_at_stage_3_alone() -> None:
    assert run_ranks(refused_without_hooks, 2, 2) == ["", ""]
    assert all("'not here'" in said for said in run_ranks(refused_without_hooks, 2, 3))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_activation_written_in_place_after_it_was_saved_is_refused(stage: int) -> None:
    for quiet, said in run_ranks(refusals, 2, stage):
        assert not quiet and "modified by an inplace operation" in said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_forward_without_backward_leaves_no_activation_behind(stage: int) -> None:
    assert run_ranks(outlives_its_graph, 2, stage) == [False, False]
