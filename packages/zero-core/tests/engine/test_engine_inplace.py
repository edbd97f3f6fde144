"""What backward needs and user code has written in place since is refused at every stage, as in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_core
from zero_comm import run_ranks


class Overwriting(nn.Module):
    """Writes an activation in place that backward needs, where ``again`` says so."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.again = nn.Linear(6, 6), nn.Linear(6, 3), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).exp()
        found: torch.Tensor = self.second(hidden)
        if self.again:
            hidden.mul_(2)
        return found


def refusals(stage: int) -> list[str]:
    said = []
    for again in (False, True):
        model = Overwriting(again=again)
        zero = {"stage": stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
        try:
            engine.backward(engine(torch.ones(2, 6)).sum())
            engine.step()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        engine.destroy(unshard=False)
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_activation_written_in_place_after_it_was_saved_is_refused(stage: int) -> None:
    for quiet, said in run_ranks(refusals, 2, stage):
        assert not quiet and "modified by an inplace operation" in said
