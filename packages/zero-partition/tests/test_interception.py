"""Released parameters that no hook announces: brought inside a pass, left alone outside."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from partition_models import cut, gathered_bytes, make, tokens
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zero_comm import run_ranks
from zero_partition import ShardedOptimizer, full_parameter


class Borrowing(nn.Module):
    """The root uses its children's weights by itself, early, late and again; nobody calls ``self.shared``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.shared = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(x, self.layers[2].weight)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = functional.linear(x, self.shared.weight, self.shared.bias)
        return functional.linear(x, self.layers[0].weight.t() + self.shared.weight).square().mean()


def borrowed() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Borrowing().double()
    reference = copy.deepcopy(model)
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    present = []
    for step in range(4):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).backward()
        optimizer.step()
        present.append(gathered_bytes(parts))
        reference(x).backward()
        expected.step()
        reference.zero_grad()
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    deviation = max(float((a - b).abs().max()) for a, b in zip(wholes, reference.parameters(), strict=True))
    return {"deviation": deviation, "present": present}


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_used_by_another_module_follow_one_process_and_are_released_after_the_pass(world_size: int) -> None:
    for facts in run_ranks(borrowed, world_size):
        assert facts["deviation"] < 1e-12 and facts["present"] == [0] * 4


def outside() -> dict[str, Any]:
    """Only rank 0 looks at weights outside a pass: it must not wait for the others."""
    model = make()
    parts = cut(model, 3)
    calls = parts.groups.gather.ledger.calls()
    facts: dict[str, Any] = {}
    if parts.rank == 0:
        weight = model.blocks[0][0].weight
        facts = {"dtype": weight.dtype, "shape": tuple(weight.shape), "nan": bool(weight.isnan().all())}
        facts["text"] = "nan" in str(model.norm.weight)
    facts["silent"] = parts.groups.gather.ledger.calls() == calls
    model(tokens()).backward()
    return facts


def test_looking_at_a_released_parameter_outside_a_pass_issues_no_collective() -> None:
    zero, one = run_ranks(outside, 2)
    assert zero == {"dtype": torch.float64, "shape": (13, 7), "nan": True, "text": True, "silent": True}
    assert one == {"silent": True}


def copies() -> dict[str, bool]:
    model = make()
    parts = cut(model, 3)
    kinds = {type(m._parameters) for m in copy.deepcopy(model).modules()}
    names = [name for name, _ in model.named_parameters()]
    parts.close()
    return {
        "copies are plain": kinds == {dict},
        "closed is plain": {type(m._parameters) for m in model.modules()} == {dict},
        "names": names == [name for name, _ in make().named_parameters()],
    }


def test_copies_of_a_watched_model_and_the_closed_model_are_plain() -> None:
    for facts in run_ranks(copies, 2):
        assert all(facts.values()), facts


def build_while_a_partition_is_collected() -> bool:
    """Collect a partition that nobody has closed while torch iterates over its hooks on registrations; return whether
    it was collected then."""
    collected = []
    collecting = [
        register(lambda *_: collected.append(gc.collect()))
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook)
    ]
    gc.disable()
    model = make()
    parts = cut(model, 3)
    parts.cycle = parts  # type: ignore[attr-defined]
    gone = weakref.ref(parts)
    del model, parts
    nn.Sequential(nn.Linear(2, 2))
    gc.enable()
    for handle in collecting:
        handle.remove()
    return gone() is None and len(collected) > 0


def test_a_model_can_be_built_while_a_partition_that_nobody_closed_is_collected() -> None:
    assert run_ranks(build_while_a_partition_is_collected, 1) == [True]
