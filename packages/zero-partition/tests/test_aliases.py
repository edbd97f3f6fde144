"""Outputs of a forward pass that share memory with parameters."""

from __future__ import annotations

import torch
from partition_models import cut, gathered_bytes
from torch import nn

from zero_comm import run_ranks


class GivesWeight(nn.Module):
    """Returns a view of a parameter beside its output, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        for layer in self.layers:
            x = layer(x)
        return x, self.layers[0].weight[1:3], {"bias": self.layers[1].bias}


def alias() -> dict[str, bool]:
    torch.manual_seed(0)
    model = GivesWeight().double()
    weight = model.layers[0].weight.detach()[1:3].clone()
    parts = cut(model, 3)
    output, view, more = model(torch.ones(2, 6, dtype=torch.float64))
    facts = {"after forward": torch.equal(view, weight), "the parameter itself": more["bias"] is model.layers[1].bias}
    (output.sum() + view.sum()).backward()
    facts["after backward"] = torch.equal(view, weight)
    with torch.no_grad():
        model(torch.ones(2, 6, dtype=torch.float64))
    facts["after another forward"] = torch.equal(view, weight)
    del output, view
    parts.runtime.reducer.clear()
    model(torch.ones(2, 6, dtype=torch.float64))[0].sum().backward()
    facts["released when nobody holds it"] = gathered_bytes(parts) == 0
    return facts


def test_outputs_that_share_memory_with_parameters_stay_readable_while_they_live() -> None:
    for facts in run_ranks(alias, 2):
        assert all(facts.values()), facts
