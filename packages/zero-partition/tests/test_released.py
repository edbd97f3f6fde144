"""Computing with released parameters: brought inside a training pass, refused by name elsewhere, facts for nothing."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from partition_models import cut, make, tokens
from torch import nn

from zero_comm import run_ranks
from zero_partition import (
    ReleasedParameterError,
    ShardedOptimizer,
    UnitState,
    full_gradient,
    full_parameter,
    gathered,
)


class SkipsBiasAdd(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        return nn.functional.linear(x, self.weight), self.bias


class Block(nn.Module):
    """Adds what its submodules return, one of them from a list that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.up = SkipsBiasAdd(6, 9)
        self.more = nn.ModuleList([SkipsBiasAdd(9, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, bias = self.up(x)
        h, last = self.more[0](torch.tanh(h + bias))
        return x + h + last


class Megatron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.gathered: list[int] = []
        self.looks: Any = lambda: 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered = []
        for block in self.blocks.values():
            x = block(x)
            self.gathered.append(self.looks())
        return x.square().mean()


def returned(only_rank_0: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Megatron().double()
    reference = copy.deepcopy(model)
    parts = cut(model, 3, device=torch.device("cpu"))
    model.looks = lambda: sum(u.state is UnitState.GATHERED for u in parts.units)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    calls = []
    for number in range(4):
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        before = parts.groups.gather.ledger.calls("gather")
        loss = model(x)
        calls.append(parts.groups.gather.ledger.calls("gather") - before)
        loss.backward()
        optimizer.step()
        reference(x).backward()
        expected.step()
        reference.zero_grad()
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    distance = max(float((a - b).abs().max()) for a, b in zip(wholes, reference.parameters(), strict=True))
    return {"distance": distance, "gathered": model.gathered, "calls": calls, "units": len(parts.units)}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_returned_parameter_stays_until_the_module_around_is_done(world_size: int) -> None:
    for facts in run_ranks(returned, world_size, False):
        assert facts["distance"] < 1e-12
        assert facts["gathered"] == [0, 0, 0, 0]  # nothing of a block stays behind it
        assert facts["calls"][-1] == facts["calls"][0]  # each unit comes once


def error_of(call: Any) -> str:
    try:
        call()
    except ReleasedParameterError as error:
        return str(error)
    return "none"


READS: dict[str, Any] = {
    "norm": lambda p: p.norm(),
    "compare": lambda p: p.abs() > 0.1,
    "greater": lambda p: p > 0.1,
    "equal": lambda p: torch.equal(p, p),
    "data": lambda p: p.data.mul(2),
    "detached": lambda p: torch.zeros(p.shape, dtype=p.dtype).lerp_(p.detach(), 0.5),
    "copied from": lambda p: torch.empty(p.shape, dtype=p.dtype).copy_(p),
    "cast": lambda p: p.float(),
    "stacked": lambda p: torch.stack([p, p]),
    "rows": lambda p: list(p),
    "transposed": lambda p: p.T,
    "clone": lambda p: p.data.clone(),
    "numpy": lambda p: p.detach().numpy(),
    "pickle": pickle.dumps,
    "saved": lambda p: torch.save({"weight": p}, io.BytesIO()),
    "detached and saved": lambda p: torch.save({"weight": p.detach().cpu()}, io.BytesIO()),
    "data pickled": lambda p: pickle.dumps([p.data]),
}
WRITES: dict[str, Any] = {
    "fill": lambda p: p.fill_(1.0),
    "data fill": lambda p: p.data.fill_(1.0),
    "init": lambda p: nn.init.normal_(p),
    "item": lambda p: p.detach().__setitem__(0, 1.0),
    "out": lambda p: torch.add(torch.ones(p.shape, dtype=p.dtype), 1.0, out=p.data),
    "decay": lambda p: p.data.mul_(0.9),
}


def outside() -> dict[str, Any]:
    """On rank 0 alone, where waiting for the others would never end; then a step, which nothing has harmed."""
    model = make()
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    facts: dict[str, Any] = {}
    weight = model.blocks[0][0].weight
    if dist.get_rank() == 0:
        calls = parts.groups.gather.ledger.calls("gather")
        with torch.no_grad():
            facts = {name: error_of(lambda call=call: call(weight)) for name, call in {**READS, **WRITES}.items()}
        facts["grad enabled"] = error_of(lambda: weight.pow(2).sum())
        seen = (weight.shape, weight.data.dtype, weight.detach().numel(), weight.is_leaf, bool(weight.isnan().all()))
        facts["facts"] = seen == ((13, 7), torch.float64, 91, True, True)
        facts["probed"] = not hasattr(weight, "__cuda_array_interface__")
        facts["same"] = weight.to(torch.float64) is weight and isinstance(weight, nn.Parameter)
        facts["like"] = torch.zeros_like(weight).sum() == 0 and torch.ones(91).view_as(weight).shape == (13, 7)
        facts["silent"] = parts.groups.gather.ledger.calls("gather") == calls
    model(tokens()).backward()
    optimizer.step()
    facts["finite"] = bool(full_parameter(parts, weight).isfinite().all())
    return facts


def test_outside_a_training_pass_values_are_refused_by_name_and_facts_are_free() -> None:
    zero, one = run_ranks(outside, 2)
    assert one == {"finite": True}
    for name in (*READS, "grad enabled"):
        assert "'blocks.0.0.weight'" in zero[name] and "`with gathered(" in zero[name], name
    for name in WRITES:
        assert "'blocks.0.0.weight'" in zero[name] and "modifier_rank=0" in zero[name], name
    assert all(bool(zero[name]) for name in ("facts", "probed", "same", "like", "silent", "finite"))


def in_the_loss(own: bool) -> dict[str, Any]:
    """Only the last rank adds a decay to its loss; the others serve it and wait for nothing else."""
    model, reference = make(), make()
    parts = cut(model, 3)
    adds = dist.get_rank() == dist.get_world_size() - 1
    weight = model.blocks[1][2].weight
    facts: dict[str, Any] = {}
    for call, by in ((model, parts), (reference, None)):
        loss = call(tokens())
        wanted = dict(call.named_parameters())["blocks.1.2.weight"]
        if by is not None and adds and own:
            with torch.no_grad():
                facts["no_grad"] = error_of(lambda: weight.norm())
            loss = loss + sum(wanted.pow(2).sum() + (wanted * 2).abs().sum() for _ in range(2))
        if by is None:
            share = 1 / dist.get_world_size() if own else 1
            loss = loss + share * sum(wanted.pow(2).sum() + (wanted * 2).abs().sum() for _ in range(2))
        elif not own:
            with gathered(parts, [weight]):
                loss = loss + sum(wanted.pow(2).sum() + (wanted * 2).abs().sum() for _ in range(2))
        loss.backward()
    gradient = full_gradient(parts, weight)
    facts["distance"] = float((gradient - reference.blocks[1][2].weight.grad).abs().max())
    facts["released"] = all(u.state is UnitState.RELEASED for u in parts.units)
    return facts


@pytest.mark.parametrize("own", [True, False], ids=["one rank by itself", "all ranks inside gathered"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_in_the_loss_count_whoever_reads_them(world_size: int, own: bool) -> None:
    answers = run_ranks(in_the_loss, world_size, own)
    assert all(facts["distance"] < 1e-12 and facts["released"] for facts in answers)
    assert not own or "'blocks.1.2.weight'" in answers[-1]["no_grad"]


def copied() -> list[bool]:
    model, reference = make(), make()
    parts = cut(model, 3)
    twin = copy.deepcopy(model)
    kinds = {type(p) for p in twin.parameters()}
    released = all(unit.state is UnitState.RELEASED for unit in parts.units)
    return [kinds == {nn.Parameter}, released] + [
        torch.equal(p, q) for p, q in zip(twin.parameters(), reference.parameters(), strict=True)
    ]


def test_a_deep_copy_has_the_values() -> None:
    assert all(all(facts) for facts in run_ranks(copied, 2))


def read_on_another_thread() -> tuple[str, float]:
    torch.manual_seed(0)
    model = Megatron().double()
    reference = copy.deepcopy(model)
    parts = cut(model, 3, device=torch.device("cpu"))
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    last = model.blocks["3"].up
    refused: list[str] = []

    def look() -> None:
        try:
            last.weight.norm()
        except ReleasedParameterError as error:
            refused.append(str(error))

    def look_elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=look, name="logger")
        thread.start()
        thread.join()

    handle = model.blocks["0"].register_forward_hook(look_elsewhere)
    x = torch.ones(3, 6, dtype=torch.float64)
    model(x).backward()
    handle.remove()
    optimizer.step()
    reference(x).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    with gathered(parts, list(model.parameters())):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        far = max(float((ours - theirs).abs().max().detach()) for ours, theirs in pairs)
    return refused[0] if refused else "", far


@pytest.mark.parametrize("world_size", (1, 2))
def test_a_read_on_another_thread_is_refused_by_name_and_training_goes_on(world_size: int) -> None:
    for refused, far in run_ranks(read_on_another_thread, world_size):
        named = "blocks.3" in refused and "'logger'" in refused
        assert named if world_size > 1 else not refused  # one rank has nothing to gather
        assert far <= 1e-12
