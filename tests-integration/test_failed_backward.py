"""A hook that fails inside loss.backward() leaves no half-open pass: the engine goes on, or every rank is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run, deviation

from zero_comm import run_ranks


def fail(_gradient: torch.Tensor) -> None:
    raise ValueError("the user's hook fails")


class Broken(torch.autograd.Function):
    """A loss whose backward fails before autograd comes to the model's output."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("the user's loss fails")


def loss_of(model: Any, number: int) -> torch.Tensor:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return sum(model(*zoo.batch(number, 0, rank, ranks)))  # type: ignore[return-value]


def scripted(model: Any, module: torch.nn.Module, step: Any, zero_grad: Any) -> None:
    """Fails three times, and drops what came of the half pass."""
    for number in range(4):
        if number == 2:
            with pytest.raises(ValueError, match="the user's loss"):
                Broken.apply(loss_of(model, number)).backward()
        if number in (1, 2):
            handle = module.blocks[1].down.weight.register_hook(fail)
            with pytest.raises(ValueError, match="the user's hook"):
                loss_of(model, number).backward()
            handle.remove()
            zero_grad()
        loss_of(model, number).backward()
        step()


def alone(stages: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in stages:
        engine = training.start(Run(), stage)
        scripted(engine, engine.module, engine.step, engine.optimizer.zero_grad if stage % 2 else engine.zero_grad)
        found.append(training.weights(engine))
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("world_size", (1, 2))
def test_where_every_rank_fails_they_go_on_as_plain_torch_does(world_size: int) -> None:
    model = zoo.build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    scripted(model, model, step, optimizer.zero_grad)
    for found in run_ranks(alone, world_size, (0, 1, 2, 3)):
        for stage, weights in enumerate(found):
            assert deviation(weights, {n: p.detach() for n, p in model.named_parameters()}) <= 1e-12, stage


def without_communication(stage: int) -> dict[str, torch.Tensor]:
    """The first of two micro-batches fails on rank 1 only, where nothing is reduced yet."""
    engine = training.start(Run(accumulation=2), stage)
    if dist.get_rank() == 1:
        handle = engine.module.blocks[1].down.weight.register_hook(fail)
        with pytest.raises(ValueError, match="the user's hook"):
            loss_of(engine, 0).backward()
        handle.remove()
        engine.module.zero_grad()
    for number in range(2):
        engine.backward(loss_of(engine, number))
        engine.step()
    found = training.weights(engine)
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("stage", (0, 1))
def test_a_pass_that_is_not_reduced_fails_on_one_rank_alone(stage: int) -> None:
    model = zoo.build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    for number in range(2):
        sum(model(*zoo.batch(number, 0))).div(2).backward()  # type: ignore[union-attr]
    optimizer.step()
    for weights in run_ranks(without_communication, 2, stage):
        assert deviation(weights, {n: p.detach() for n, p in model.named_parameters()}) <= 1e-12


def told(stage: int) -> list[str]:
    """What rank 0 hears of rank 1's failure; rank 1 lives on."""
    engine = training.start(Run(), stage)
    seen: list[str] = []
    if dist.get_rank() == 1:
        engine.module.blocks[1].down.weight.register_hook(fail)
    loss = loss_of(engine, 0)
    for call in (loss.backward, engine.step):
        try:
            call()
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_a_pass_that_is_reduced_fails_on_every_rank(stage: int) -> None:
    waiting, failed = run_ranks(told, 2, stage, timeout=60)
    assert waiting
    assert "the user's hook fails" in failed[0]
    assert any("rank 1" in text or "loss.backward()" in text for text in waiting), waiting
