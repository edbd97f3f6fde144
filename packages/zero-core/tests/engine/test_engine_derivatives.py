"""More than one backward pass: second derivatives, torch.func, parameters that stop and continue being trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import BATCH, RANKS, STAGES, adamw, batch, build, distance, outcome, plain, start, train, weights
from torch import nn

from zero_comm import run_ranks

STEPS = 3
Loss = Callable[[nn.Module, nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def slope_of_the_inputs(call: nn.Module, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A gradient penalty as in WGAN-GP; the mean over samples, so that ranks average to the whole batch's."""
    x = x.requires_grad_(True)
    loss = call(x, y)
    (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
    return loss + slope.square().sum(1).mean()


def slope_of_the_parameters(call: nn.Module, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Linear in the gradients, for the same reason."""
    loss = call(x, y)
    chosen = [model.blocks[0].weight, model.head.bias]
    slopes = torch.autograd.grad(loss, chosen, create_graph=True)
    return loss + sum(slope.sum() for slope in slopes)


def third_derivative(call: nn.Module, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_(True)
    (slope,) = torch.autograd.grad(call(x, y) * len(x), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return bend.square().sum(1).mean()


LOSSES: dict[str, Loss] = {
    "of inputs": slope_of_the_inputs,
    "of parameters": slope_of_the_parameters,
    "third": third_derivative,
}


def differentiated(stage: int, which: str) -> dict[str, torch.Tensor]:
    engine = start(stage)
    for number in range(STEPS):
        engine.backward(LOSSES[which](engine, engine.module, *batch(number)))
        engine.step()
    result = weights(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("stage", STAGES)
def test_second_derivatives_outside_forward_are_those_of_one_process(stage: int, which: str) -> None:
    model = build()
    optimizer = adamw(model)
    for number in range(STEPS):
        LOSSES[which](model, model, *batch(number, whole=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours in run_ranks(differentiated, RANKS, stage, which):
        assert distance(ours, weights(model)) <= 1e-12


def graph_of_gradients(stage: int) -> str:
    engine = start(stage)
    return outcome(lambda: engine(*batch(0)).backward(create_graph=True))


@pytest.mark.parametrize("stage", STAGES)
def test_backward_with_a_graph_is_refused_by_name(stage: int) -> None:
    for error in run_ranks(graph_of_gradients, RANKS, stage):
        assert "PartitionError" in error and "backward(create_graph=True)" in error and "autograd.grad" in error


def transformed(stage: int) -> dict[str, Any]:
    """What torch.func gives over the engine's module, and the weights after a step that follows it."""
    engine = start(stage)
    model = engine.module
    x, y = batch(0)
    refusals = [
        outcome(lambda: torch.func.grad(lambda x: model(x, y))(x)),
        outcome(lambda: torch.func.jvp(lambda x: model(x, y), (x,), (x,))),
    ]
    found: dict[str, Any] = {"refusals": refusals}
    found["vmap"] = torch.func.vmap(lambda x, y: model(x[None], y[None]))(x, y).detach()
    with engine.gathered(model.parameters()):
        copies = {name: p.detach().clone() for name, p in model.named_parameters()}
        found["grad"] = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x, y)))(copies)
        found["hessian"] = torch.func.hessian(lambda x: model(x, y))(x).detach()
        each = torch.func.grad(lambda p, x, y: torch.func.functional_call(model, p, (x[None], y[None])))
        found["per sample"] = torch.func.vmap(each, in_dims=(None, 0, 0))(copies, x, y)
        found["jvp"] = torch.func.jvp(lambda x: model(x, y), (x,), (torch.ones_like(x),))[1].detach()
    train(engine, 0, 2)
    found["weights"] = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_functional_transforms_work_on_whole_parameters_and_are_refused_by_name_without(stage: int) -> None:
    answers = run_ranks(transformed, RANKS, stage)
    size = BATCH // RANKS
    for rank, found in enumerate(answers):
        model = build()
        x, y = (part[rank * size : (rank + 1) * size] for part in batch(0, whole=True))
        own = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.grad(lambda p, x, y, model=model: torch.func.functional_call(model, p, (x[None], y[None])))
        expected = {
            "vmap": torch.stack([model(x[i : i + 1], y[i : i + 1]) for i in range(size)]).detach(),
            "hessian": torch.func.hessian(lambda x, model=model, y=y: model(x, y))(x).detach(),
            "jvp": torch.func.jvp(lambda x, model=model, y=y: model(x, y), (x,), (torch.ones_like(x),))[1].detach(),
        }
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name
        grad = torch.func.grad(lambda p, model=model, x=x, y=y: torch.func.functional_call(model, p, (x, y)))(own)
        assert distance(found["grad"], grad) <= 1e-12
        assert distance(found["per sample"], torch.func.vmap(each, in_dims=(None, 0, 0))(own, x, y)) <= 1e-12
        plain(model, adamw(model), 0, 2)
        assert distance(found["weights"], weights(model)) <= 1e-12
        for refusal in found["refusals"]:
            if stage < 3:
                assert refusal == "no error"
            else:
                assert "PartitionError" in refusal and "torch.func" in refusal and "engine.gathered" in refusal


def paused(stage: int) -> dict[str, torch.Tensor]:
    engine = start(stage)
    train(engine, 0, 1)
    engine.module.blocks[0].requires_grad_(False)
    engine.module.head.bias.requires_grad_(False)
    train(engine, 1, 3)
    engine.module.requires_grad_(True)
    train(engine, 3, 5)
    result = weights(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_what_stops_requiring_gradients_rests_until_it_does_again(stage: int) -> None:
    model = build()
    optimizer = adamw(model)
    plain(model, optimizer, 0, 1)
    model.blocks[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    plain(model, optimizer, 1, 3)
    model.requires_grad_(True)
    plain(model, optimizer, 3, 5)
    for ours in run_ranks(paused, RANKS, stage):
        assert distance(ours, weights(model)) <= 1e-12
