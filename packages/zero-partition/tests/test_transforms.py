"""torch.func's transforms of a part of the model inside forward, and checkpointing around all of it, at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from partition_models import cut
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

from zero_comm import run_ranks
from zero_partition import ShardedOptimizer, full_parameter, gathered

Inside = Callable[[nn.Module, torch.Tensor], torch.Tensor]
BY_THEMSELVES: dict[str, Inside] = {
    "jvp": lambda part, x: jvp(part, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda part, x: vmap(jacfwd(part))(x),
    "vmap": lambda part, x: vmap(part)(x),
}
IN_GATHERED: dict[str, Inside] = {
    "grad": lambda part, x: grad(lambda z: part(z).square().sum())(x),
    "vjp": lambda part, x: vjp(part, x)[1](torch.ones(2, 3, dtype=x.dtype))[0],
    "jacrev": lambda part, x: vmap(jacrev(part))(x),
    "hessian": lambda part, x: vmap(hessian(part))(x),
}
WHOLE: dict[str, bool] = {"checkpoint": False, "reentrant checkpoint": True}
EVERY = {**BY_THEMSELVES, **IN_GATHERED}


class Transformed(nn.Module):
    def __init__(self, inside: Inside) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(self.part, x).square().mean()


def trained(how: str, sharded: bool, *, opened: bool) -> dict[str, torch.Tensor]:
    model = Transformed(EVERY.get(how, lambda part, x: part(x)))
    if how == "checkpoint":
        first = model.part[0].forward
        model.part[0].forward = lambda x: checkpoint(first, x, use_reentrant=False)
    parts = cut(model, 3) if sharded else None
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if parts is not None:
        optimizer = ShardedOptimizer(optimizer, parts)
    for step in range(4):
        x = torch.linspace(-1, 1 + step, 10, dtype=torch.float64).view(2, 5).requires_grad_()
        with gathered(parts, list(model.parameters())) if parts is not None and opened else nullcontext():
            loss = checkpoint(model, x, use_reentrant=WHOLE[how]) if how in WHOLE else model(x)
        loss.backward()
        optimizer.step()
        if parts is None:
            optimizer.zero_grad()
    names = dict(model.named_parameters())
    return {n: p.detach() if parts is None else full_parameter(parts, p) for n, p in names.items()}


def everything() -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    found = {how: trained(how, True, opened=how in IN_GATHERED) for how in (*EVERY, *WHOLE)}
    refused = {}
    for how in IN_GATHERED:
        try:
            trained(how, True, opened=False)
        except RuntimeError as error:
            refused[how] = str(error)
    return found, refused


@pytest.mark.parametrize("world_size", [1, 2])
def test_transforms_inside_forward_and_checkpoints_around_it_train_as_in_torch(world_size: int) -> None:
    for found, refused in run_ranks(everything, world_size, timeout=60):
        for how in (*EVERY, *WHOLE):
            for name, weight in trained(how, False, opened=False).items():
                assert torch.allclose(found[how][name], weight, rtol=0, atol=1e-12), (how, name)
        assert set(refused) == (set(IN_GATHERED) if world_size > 1 else set())
        for how, text in refused.items():
            assert "'part.0.weight'" in text and "engine.gathered(" in text, (how, text)


def traced(stage: int) -> str:
    model = Transformed(lambda part, x: linearize(part, x)[0])
    cut(model, stage)
    with pytest.raises(TypeError) as refused:
        model(torch.ones(2, 5, dtype=torch.float64))
    return str(refused.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_linearize_inside_forward_is_refused_by_name(stage: int) -> None:
    for text in run_ranks(traced, 2, stage, timeout=60):
        assert "torch.func.linearize" in text and "'part.0.weight'" in text


def shape_in_fake_mode(model: nn.Module, x: torch.Tensor) -> list[int]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        return list(model(mode.from_tensor(x)).shape)


def takes_subclasses_of_parameters() -> bool:
    """Return whether torch's FakeTensorMode takes parameters of a subclass, as an engine's are; 2.13 does, 2.11 not."""
    try:
        return shape_in_fake_mode(WithParameterOfSubclass(), torch.ones(2, 5, dtype=torch.float64)) == [2, 5]
    except TypeError:
        return False


class ParameterOfSubclass(nn.Parameter):
    pass


class WithParameterOfSubclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = ParameterOfSubclass(torch.ones(5, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


TRACES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x)(x).tolist(),
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module()(x).tolist(),
}
if takes_subclasses_of_parameters():
    TRACES["FakeTensorMode"] = shape_in_fake_mode


@torch.no_grad()
def traces(stage: int) -> dict[str, Any]:
    model = Transformed(lambda part, x: part(x)).part
    parts = cut(model, stage)
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)
    found: dict[str, Any] = {"forward": model(x).tolist()}
    for how, trace in TRACES.items():
        with gathered(parts, list(model.parameters())):
            found[how] = trace(model, x)
        try:
            trace(model, x)
        except RuntimeError as error:
            found[f"refused {how}"] = str(error)
    return {**found, "afterwards": model(x).tolist()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_traces_of_the_model_need_gathered_at_stage_3_and_leave_it_as_it_was(stage: int, world_size: int) -> None:
    for found in run_ranks(traces, world_size, stage, timeout=60):
        for how in ("torch.jit.trace", "torch.export", "afterwards"):
            assert found[how] == found["forward"], how
        assert found.get("FakeTensorMode", [2, 3]) == [2, 3]
        for how in TRACES:
            refused = found.get(f"refused {how}")
            assert (refused is not None) == (stage == 3 and world_size > 1), (how, refused)
            assert refused is None or ("'0.weight'" in refused and "gathered(" in refused), refused
