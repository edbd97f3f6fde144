"""Correct scripts whose gradients do not all come from one call of each module, for `audit_every`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from audit_trainer import STEPS, Calls, Trainer, mlp, script
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import zero_core


@script
def engine_called_twice(t: Trainer) -> None:
    t.loop(mlp(5, 7, 6, 3), lambda engine, x: (engine(x) - engine(x.flip(0))).pow(2).mean())


@script
def two_engines(t: Trainer) -> None:
    maker, judge = t.start(mlp(4, 6, 5)), t.start(mlp(5, 6, 1))
    for number in range(STEPS):
        z, x = t.x(number, 4), t.x(50 + number, 5)
        t.finish(judge, F.softplus(-judge(x)).mean() + F.softplus(judge(maker(z).detach())).mean())
        t.finish(maker, F.softplus(-judge(maker(z))).mean())
        judge.zero_grad()


@script
def gradient_penalty_of_two_engines(t: Trainer) -> None:
    maker, judge = t.start(mlp(4, 6, 5)), t.start(mlp(5, 6, 1))
    for number in range(STEPS):
        z, x = t.x(number, 4), t.x(50 + number, 5).requires_grad_()
        (slope,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
        t.finish(judge, judge(maker(z).detach()).mean() - judge(x).mean() + (slope.norm(2, 1) - 1).pow(2).mean())
        t.finish(maker, -judge(maker(z)).mean())
        judge.zero_grad()


@script
def weights_in_the_loss(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)
    t.loop(model, lambda engine, x: engine(x).pow(2).mean() + 0.01 * sum(p.pow(2).sum() for p in model.parameters()))


@script
def penalty_by_a_hook(t: Trainer) -> None:
    model, penalties = mlp(5, 7, 6, 3), []
    model[0].register_forward_hook(lambda module, _got, _made: penalties.append(module.weight.pow(2).sum()))

    def loss(engine: zero_core.Engine, x: torch.Tensor) -> torch.Tensor:
        penalties.clear()
        return engine(x).pow(2).mean() + 0.1 * penalties[0]

    t.loop(model, loss)


class Encoder(nn.Module):
    """A block with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 5)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.encode(x))


@script
def method_beside_forward(t: Trainer) -> None:
    t.loop(Encoder(), lambda engine, x: engine(x).pow(2).mean() + engine.module.encode(x).pow(2).mean())


@script
def method_of_a_block(t: Trainer) -> None:
    t.loop(Calls(Encoder(), lambda inner, x: inner(x) + inner.encode(x).mean()))


@script
def tied_after_initialize(t: Trainer) -> None:
    model = mlp(5, 5, 5)
    engine = t.start(model)
    for number in range(STEPS):
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())
        model[2].weight = model[0].weight


@dataclasses.dataclass
class Found:
    """An output that torch does not look into."""

    made: torch.Tensor
    weight: torch.Tensor


class MakesDataclass(nn.Module):
    """Returns a dataclass with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Found:
        return Found(self.linear(x), self.linear.weight)


class UsesDataclass(nn.Module):
    """Uses what `MakesDataclass` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = MakesDataclass()
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.maker(x)
        return self.out(found.made) + found.weight.mean()


@script
def dataclass_output(t: Trainer) -> None:
    t.loop(UsesDataclass())


class MakesClosure(nn.Module):
    """Returns a function of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        made = self.linear(x)
        return lambda: made.pow(2).mean() + self.linear.weight.pow(2).mean()


@script
def closure_output(t: Trainer) -> None:
    t.loop(MakesClosure(), lambda engine, x: engine(x)())


@script
def hooks_that_change_values(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)
    engine = t.start(model)
    model[0].register_forward_pre_hook(lambda _module, got: (got[0] * 2,))
    model[2].register_forward_hook(lambda module, _got, made: made + module.weight.sum())
    model[2].register_full_backward_hook(lambda _module, into, _from: tuple(g * 0.5 for g in into))
    model[4].register_full_backward_pre_hook(lambda _module, got: (got[0] * 3,))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    for number in range(STEPS):
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


@script
def hooks_with_other_weights(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)
    model[0].register_forward_hook(lambda _module, _got, made: made + model[4].weight.mean())
    t.loop(model)


@script
def hooks_on_outputs(t: Trainer) -> None:
    def doubled(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made = inner(x)
        made.register_hook(lambda gradient: gradient * 2)
        return made

    t.loop(Calls(mlp(5, 7, 3), doubled))


@script
def second_derivatives_of_weights(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)

    def loss(engine: zero_core.Engine, x: torch.Tensor) -> torch.Tensor:
        first = engine(x).pow(2).mean()
        return first + torch.autograd.grad(first, model[0].weight, create_graph=True)[0].mean()

    t.loop(model, loss)


@script
def second_derivatives_of_inputs(t: Trainer) -> None:
    def loss(engine: zero_core.Engine, x: torch.Tensor) -> torch.Tensor:
        made = engine(x.requires_grad_()).pow(2).sum(1).mean()
        return made + torch.autograd.grad(made, x, create_graph=True)[0].abs().sum()

    t.loop(mlp(5, 7, 6, 3), loss)


@script
def old_spectral_norm(t: Trainer) -> None:
    t.loop(nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3)))


class ReturnsView(nn.Module):
    """Returns a view of its weight, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.linear(x), self.linear.weight.view(-1)[:4], self.linear.bias


@script
def returned_view_of_a_weight(t: Trainer) -> None:
    def loss(engine: zero_core.Engine, x: torch.Tensor) -> torch.Tensor:
        made, view, bias = engine(x)
        return made.pow(2).mean() + view.pow(2).sum() + bias.sum()

    t.loop(ReturnsView(), loss)


@script
def reentrant_checkpoint(t: Trainer) -> None:
    t.loop(
        Calls(mlp(5, 7, 6, 3), lambda inner, x: checkpoint(inner[2:], inner[:2](x), use_reentrant=True)),
        lambda engine, x: engine(x.requires_grad_()).pow(2).mean(),
    )


class LowRank(nn.Module):
    """A parametrization with weights of its own."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, columns))
        self.b = nn.Parameter(torch.randn(rows, 2) * 0.1)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


@script
def cached_parametrization(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)
    parametrize.register_parametrization(model[0], "weight", LowRank(7, 5))
    engine = t.start(model)
    for number in range(STEPS):
        with parametrize.cached():
            engine.backward((engine(t.x(number, 5)) + engine(t.x(9 + number, 5))).pow(2).mean())
        t.step(engine)


@script
def computed_weights(t: Trainer) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = {name: parameter * 2 for name, parameter in inner[2].named_parameters()}
        made = torch.func.functional_call(inner[2], doubled, (inner[:2](x),))
        return inner[3:](made)

    t.loop(Calls(mlp(5, 7, 6, 3), forward))


@script
def saved_tensors_in_half(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)
    engine = t.start(model)
    for number in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: (saved.dtype, saved.float()), lambda kept: kept[1].to(kept[0])
        ):
            loss = engine(t.x(number, 5)).pow(2).mean()
        t.finish(engine, loss)


@script
def states_that_are_looked_at(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 6, 3))
    for number in range(STEPS):
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())
        for state in engine.optimizer.state.values():
            state["momentum_buffer"].abs()


@script
def vmap_of_a_module(t: Trainer) -> None:
    t.loop(Calls(mlp(5, 7, 6, 3), lambda inner, x: torch.func.vmap(inner)(x)))


@script
def compiled_submodule(t: Trainer) -> None:
    for backend in ("eager", "aot_eager"):
        model = mlp(5, 7, 6, 3)
        engine = t.start(model)
        model[2].compile(backend=backend)
        for number in range(STEPS):
            t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


class Bag(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.bag((x.double() * 3).long().clamp(0, 8)))


@script
def sparse_gradients(t: Trainer) -> None:
    t.loop(Bag())


@script
def compiled_parent(t: Trainer) -> None:
    model = nn.Sequential(mlp(5, 7, 6), mlp(6, 5, 3))
    engine = t.start(model)
    model[0].compile(backend="eager")
    for number in range(STEPS):
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


@script
def compiled_engine(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 3))
    engine.compile(backend="eager")
    for number in range(STEPS):
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())
