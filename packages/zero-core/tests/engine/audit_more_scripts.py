"""More correct scripts for `audit_every`: what else models do with weights, outputs, random numbers and passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from audit_scripts import Encoder
from audit_trainer import STEPS, Calls, Trainer, mlp, script
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zero_core


class Adapted(nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.down = nn.Linear(into, 2, bias=False)
        self.up = nn.Linear(2, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Keeps(nn.Module):
    """Calls a function with itself: it may keep things in attributes."""

    def __init__(self, call: Callable[..., Any], out: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(5, out)
        self.call = call
        self.kept: Any = None
        self.count = 0
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


def blocks(*calls: Callable[..., Any]) -> nn.ModuleList:
    return nn.ModuleList(Keeps(call) for call in calls)


@script
def low_rank_adapters(t: Trainer) -> None:
    t.loop(nn.Sequential(Adapted(5, 6), nn.Tanh(), Adapted(6, 3)))


@script
def experts_that_differ_by_rank(t: Trainer) -> None:
    count = [0]

    def route(experts: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x + experts[(count[0] + dist.get_rank()) % 3](x)

    t.loop(Calls(nn.ModuleList(mlp(5, 6, 5) for _ in range(3)), route))


@script
def accumulation(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 6, 3), gradient_accumulation_steps=2)
    for number in range(2 * STEPS):
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


@script
def checkpointed_submodules(t: Trainer) -> None:
    def call(inner: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for layer in inner:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    t.loop(Calls(nn.Sequential(mlp(5, 7, 5), nn.Dropout(0.3), mlp(5, 6, 3)), call))


@script
def no_sync(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 3))
    for number in range(STEPS):
        if engine.partition.options.stage < 2:
            with engine.no_sync():
                engine.backward(engine(t.x(20 + number, 5)).pow(2).mean())
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


@script
def frozen_in_turns(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)
    engine = t.start(model)
    for number in range(STEPS):
        model[0].requires_grad_(number % 2 == 0)
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


@script
def outputs_of_many_kinds(t: Trainer) -> None:
    def call(inner: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in inner:
            found = block(x)
            x = found["hidden"] if isinstance(found, dict) else found[0]
        return x

    calls = (
        lambda block, x: {"hidden": block.linear(x), "none": None, "shape": x.shape, "unused": block.linear(x) * 2},
        lambda block, x: (block.linear(x), None, [x], 3),
        lambda block, x: block.linear(x).split(5, 1),
    )
    t.loop(Calls(blocks(*calls), call))


@script
def outputs_from_one_another(t: Trainer) -> None:
    def twice(block: Keeps, x: torch.Tensor) -> Any:
        made = block.linear(x)
        return made, [made], made.tanh()

    def call(inner: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in inner:
            first, (same,), later = block(x)
            x = first + same * 2 + later
        return x

    t.loop(Calls(blocks(twice, twice), call))


@script
def the_same_output_twice(t: Trainer) -> None:
    def twice(block: Keeps, x: torch.Tensor) -> Any:
        made = block.linear(x).tanh()
        return made, made

    def call(inner: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in inner:
            first, second = block(x)
            x = first + second * 3
        return x

    t.loop(Calls(blocks(twice, twice), call))


@script
def dropout_and_batch_norm(t: Trainer) -> None:
    t.loop(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), mlp(6, 6, 3), nn.BatchNorm1d(3)))


@script
def generators_of_modules(t: Trainer) -> None:
    def noisy(block: Keeps, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = block.linear(x)
        return made * torch.rand(made.shape, generator=block.generator, dtype=made.dtype)

    t.loop(nn.Sequential(*blocks(noisy, noisy)))


@script
def forwards_that_count(t: Trainer) -> None:
    def counting(block: Keeps, x: torch.Tensor) -> torch.Tensor:
        block.count += 1
        return block.linear(x) * block.count

    t.loop(nn.Sequential(*blocks(counting, counting)))


@script
def losses_kept_in_attributes(t: Trainer) -> None:
    def keeping(block: Keeps, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = block.linear(x)
        block.kept = made.pow(2).mean()
        return made.tanh()

    model = nn.Sequential(*blocks(keeping, keeping))
    t.loop(model, lambda engine, x: engine(x).pow(2).mean() + sum(block.kept for block in model))


@script
def tied_weights(t: Trainer) -> None:
    model = mlp(5, 5, 5, 5)
    model[4].weight = model[0].weight
    t.loop(model)


@script
def autocast_around_the_forward(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 6, 3))
    for number in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = engine(t.x(number, 5).float()).float().pow(2).mean()
        t.finish(engine, loss)


@script
def two_losses(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 6, 3))
    for number in range(STEPS):
        made = engine(t.x(number, 5))
        engine.backward(made.pow(2).mean(), retain_graph=True)
        t.finish(engine, made.abs().mean())


@script
def a_backward_of_the_users_before(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 6, 3))
    for number in range(STEPS):
        engine(t.x(20 + number, 5)).pow(2).mean().backward()
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


@script
def writes_in_place(t: Trainer) -> None:
    def call(inner: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for block in inner:
            made = block(x)
            made.mul_(2)
            made += x
            x = made
        return x

    def into_its_input(block: Keeps, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = block.linear(x.clone())
        x.mul_(2)
        return made

    def plain(block: Keeps, x: torch.Tensor) -> torch.Tensor:
        return block.linear(x).add_(1)

    t.loop(Calls(blocks(plain, into_its_input, lambda block, x: block.linear(x).transpose(0, 1).t()), call))


@script
def recurrent_layers(t: Trainer) -> None:
    def call(inner: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 3, 2, 2]), batch_first=True)
        made, _ = inner["packed"](packed)
        made, _ = inner["plain"](nn.utils.rnn.pad_packed_sequence(made, batch_first=True)[0])
        return made.sum(1) + inner["cell"](x[:, 0], inner["cell"](x[:, 1]))

    parts = {"packed": nn.LSTM(3, 4, batch_first=True), "plain": nn.LSTM(4, 4, batch_first=True)}
    engine = t.start(Calls(nn.ModuleDict({**parts, "cell": nn.GRUCell(3, 4)}), call))
    for number in range(STEPS):
        t.finish(engine, engine(t.x(number, 4, 3)).pow(2).mean())


@script
def settings_around_the_forward(t: Trainer) -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    engine = t.start(nn.Sequential(nn.Linear(4, 4), model, nn.Linear(4, 2)))
    for number in range(STEPS):
        with sdpa_kernel(SDPBackend.MATH), torch.autograd.graph.save_on_cpu():
            loss = engine(t.x(number, 3, 4)).pow(2).mean()
        engine.module.eval()
        t.finish(engine, loss)
        engine.module.train()


@script
def gradients_inside_the_forward(t: Trainer) -> None:
    def forces(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(inner(x).pow(2).sum(), x, create_graph=True)[0]

    t.loop(nn.Sequential(Calls(mlp(5, 7, 2), forces), mlp(5, 6, 2)))


class Given(nn.Module):
    """Computes with the weight it gets, and with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(self.linear(x), weight)


@script
def weights_as_arguments(t: Trainer) -> None:
    def call(inner: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        first, second = inner
        return second(first(x, second.linear.weight), second.linear.weight.t())

    t.loop(Calls(nn.ModuleList([Given(), Given()]), call))


@script
def without_and_with_gradients(t: Trainer) -> None:
    def call(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = inner(x)
        return inner(x) - target * 0.5

    t.loop(Calls(nn.Sequential(Encoder(), nn.Tanh(), Encoder()), call))


@script
def a_block_called_again_and_again(t: Trainer) -> None:
    t.loop(Calls(nn.ModuleList([mlp(5, 6, 5), mlp(5, 6, 5)]), lambda inner, x: inner[0](inner[1](inner[0](x)))))


@script
def hooks_inside_the_forward(t: Trainer) -> None:
    def scaled(block: Keeps, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = block.linear(x)
        made.register_hook(lambda gradient: gradient * 0.5)
        return made.tanh()

    t.loop(nn.Sequential(*blocks(scaled, scaled)))


@script
def hooks_on_gradients(t: Trainer) -> None:
    model, norms = mlp(5, 7, 6, 3), []
    engine = t.start(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for number in range(STEPS):
        t.finish(engine, engine(t.x(number, 5)).pow(2).mean())
    assert len(norms) == STEPS


@script
def dispatch_mode_around_the_step(t: Trainer) -> None:
    engine = t.start(mlp(5, 7, 3))
    for number in range(STEPS):
        with FlopCounterMode(display=False):
            t.finish(engine, engine(t.x(number, 5)).pow(2).mean())


@script
def parts_of_a_larger_input(t: Trainer) -> None:
    engine = t.start(Calls(nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6)), lambda inner, x: inner(x[:, 1:, ::2])))
    for number in range(STEPS):
        made = engine(t.x(number, 7, 6))
        t.finish(engine, torch.cat([made[:, :1], made.tanh()], 1).transpose(1, 2).pow(2).mean())


class Reversible(torch.autograd.Function):
    """Computes with two modules, and again in backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, first: nn.Module, *weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = first(x)
        context.save_for_backward(x)
        context.first, context.weights = first, weights
        return made

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        x = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            made = context.first(x)
        found = torch.autograd.grad(made, [x, *context.weights], gradient)
        return found[0], None, *found[1:]


@script
def functions_that_compute_in_backward(t: Trainer) -> None:
    def call(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Reversible.apply(x, inner, *inner.parameters())
        return made

    t.loop(nn.Sequential(nn.Linear(5, 5), Calls(mlp(5, 6, 5), call), nn.Linear(5, 3)))


@script
def inside_and_outside_of_a_reentrant_checkpoint(t: Trainer) -> None:
    def call(inner: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        return inner(x) + checkpoint(inner, x, use_reentrant=True)

    t.loop(
        nn.Sequential(nn.Linear(5, 5), Calls(nn.Linear(5, 5), call), nn.Linear(5, 3)),
        lambda engine, x: engine(x.requires_grad_()).pow(2).mean(),
    )


@script
def weights_used_by_the_loss_of_one_layer(t: Trainer) -> None:
    model = mlp(5, 7, 6, 3)

    def loss(engine: zero_core.Engine, x: torch.Tensor) -> torch.Tensor:
        return engine(x).pow(2).mean() + 0.1 * model[2].weight.abs().sum()

    t.loop(model, loss)
