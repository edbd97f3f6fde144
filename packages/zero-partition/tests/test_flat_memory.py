"""Views of a gathered weight that code keeps after its unit was released: they hold the values of their pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from partition_models import cut, gathered_bytes, make, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_comm import run_ranks
from zero_partition import ShardedOptimizer, full_parameter

KEEP: dict[str, Callable[[nn.Parameter], Any]] = {
    "detached": lambda weight: weight.detach(),
    "array": lambda weight: weight.detach().numpy(),
    "transposed": lambda weight: weight.detach().t(),
    "row": lambda weight: weight[1],
    "data": lambda weight: weight.data,
    "dropped array": lambda weight: float(weight.detach().numpy().sum()),
}


def as_array(kept: Any) -> Any:
    return kept.detach().numpy() if isinstance(kept, torch.Tensor) else np.asarray(kept)


class Keeps(nn.Module):
    """Keeps what ``how`` gives of a weight in every forward; ``apart`` keeps copies."""

    def __init__(self, how: str, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        self.how, self.apart = how, apart
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = KEEP[self.how](self.first.weight)
        self.kept.append(as_array(found).copy() if self.apart else found)
        return self.last(self.first(x).tanh()).square().mean()


def trained(how: str, apart: bool, sharded: bool) -> dict[str, Any]:
    model = Keeps(how, apart)
    parts = cut(model, 3) if sharded else None
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if parts is not None:
        optimizer = ShardedOptimizer(optimizer, parts)
    for step in range(3):
        x = torch.ones(2, 5, dtype=torch.float64) * (step + 1)
        model(x).backward()
        optimizer.step()
        if parts is None:
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)
    values = [as_array(kept) for kept in model.kept]
    names = dict(model.named_parameters())
    weights = {n: p.detach() if parts is None else full_parameter(parts, p) for n, p in names.items()}
    return {"kept": values, "weights": weights, "gathered": 0 if parts is None else gathered_bytes(parts)}


def all_kept() -> dict[str, dict[str, Any]]:
    return {how: trained(how, False, True) for how in KEEP}


@pytest.mark.parametrize("world_size", [1, 2])
def test_views_kept_past_the_release_have_the_values_of_their_pass(world_size: int) -> None:
    for found in run_ranks(all_kept, world_size):
        for how in KEEP:
            expected = trained(how, True, False)
            assert len(found[how]["kept"]) == 6
            if world_size > 1:  # one rank releases nothing: views follow the weight as in torch
                pairs = zip(found[how]["kept"], expected["kept"], strict=True)
                assert all(np.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs), how
                assert found[how]["gathered"] == 0, how
            for name, weight in expected["weights"].items():
                assert torch.allclose(found[how]["weights"][name], weight, rtol=0, atol=1e-12), (how, name)


def storages_in_training() -> list[bool]:
    model = make()
    head, blocks = model.head, list(model.blocks)
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    before = [unit.flat.untyped_storage()._cdata for unit in parts.units]
    same = []
    for way in ("plain", "checkpointed", "twice"):
        if way == "checkpointed":
            for block in blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        loss = model(tokens())
        if way == "twice":
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        same.append(before == [unit.flat.untyped_storage()._cdata for unit in parts.units])
    return [*same, head.weight is model.embedding.weight]


def test_what_autograd_saves_leaves_every_unit_in_its_memory() -> None:
    assert run_ranks(storages_in_training, 2) == [[True] * 4] * 2


class ReadsKeptFirst(torch.autograd.Function):
    """A product whose backward reads a kept ``weight.data`` before it asks autograd for the weight that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = weight.data
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        towards = gradient @ ctx.kept
        return towards, gradient.t() @ ctx.saved_tensors[0]


class KeepsInFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = ReadsKeptFirst.apply(self.layers[0](x), self.layers[1].weight)
        return self.layers[2](hidden.tanh()).square().sum()


def kept_in_functions(sharded: bool) -> dict[str, torch.Tensor]:
    model = KeepsInFunctions()
    parts = cut(model, 3) if sharded else None
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if parts is not None:
        optimizer = ShardedOptimizer(optimizer, parts)
    for step in range(3):
        model(torch.randn(2, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)).backward()
        optimizer.step()
        if parts is None:
            optimizer.zero_grad()
    return {n: p.detach() if parts is None else full_parameter(parts, p) for n, p in model.named_parameters()}


def test_a_view_kept_beside_a_saved_parameter_has_its_values_in_backward() -> None:
    expected = kept_in_functions(False)
    for found in run_ranks(kept_in_functions, 2, True):
        assert all(torch.allclose(found[name], weight, rtol=0, atol=1e-12) for name, weight in expected.items())
