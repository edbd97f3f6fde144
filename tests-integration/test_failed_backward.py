"""A hook that fails inside loss.backward() leaves no half-open pass: the engine continues, or every rank is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run, deviation

from zero_comm import RanksFailedError, run_ranks


def fail(*_: Any) -> None:
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


def write_saved(_module: Any, arguments: tuple[torch.Tensor, ...], _output: Any) -> None:
    arguments[0].detach().mul_(1.0)  # the layer has saved its input, and torch refuses its backward


KINDS: dict[str, Callable[[Any], object]] = {
    "hook": lambda block: block.down.weight.register_hook(fail),
    "post hook": lambda block: block.down.weight.register_post_accumulate_grad_hook(fail),
    "module hook": lambda block: block.register_full_backward_hook(fail),
    "function": lambda block: block.register_forward_hook(lambda _m, _args, output: Broken.apply(output)),
    "torch itself": lambda block: block.norm.register_forward_hook(write_saved),
}


def told(stage: int, kind: str) -> tuple[str, tuple[Any, ...]]:
    """What the ranks hear of the last one's failure, which it forgets at once; its process lives on."""
    engine = training.start(Run(), stage)
    if dist.get_rank() == dist.get_world_size() - 1:
        KINDS[kind](engine.module.blocks[1])
    loss = loss_of(engine, 0)
    found: tuple[str, tuple[Any, ...]] = ("no error", ())
    try:
        loss.backward()
    except Exception as error:
        found = type(error).__name__, error.args
    try:
        engine.step()
    except Exception as error:
        found = found if found[1] else (type(error).__name__, error.args)
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize(
    ("world_size", "stage", "kind"),
    [
        (2, 0, "post hook"),
        (2, 1, "torch itself"),
        (3, 2, "module hook"),
        (2, 3, "function"),
        *(pytest.param(n, s, k, marks=pytest.mark.soak) for n in (2, 3) for s in (0, 1, 2, 3) for k in KINDS),
    ],
)
def test_a_pass_that_is_reduced_fails_on_every_rank_with_the_cause(world_size: int, stage: int, kind: str) -> None:
    *others, (ours, arguments) = run_ranks(told, world_size, stage, kind, timeout=60)
    assert ours == ("RuntimeError" if kind == "torch itself" else "ValueError")
    assert kind == "torch itself" or arguments[0].startswith("the user's"), arguments
    for theirs, (text,) in others:
        assert theirs == "PeerError", (theirs, text)
        assert text.startswith(f"rank {world_size - 1} failed: {ours}: {arguments[0]} (in step 0, at test_failed_b"), (
            text
        )


def uncaught(stage: int) -> None:
    engine = training.start(Run(), stage)
    if dist.get_rank() == 1:
        engine.module.blocks[1].down.weight.register_hook(fail)
    loss_of(engine, 0).backward()
    engine.step()


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.soak), 3))
def test_a_failure_that_ends_its_process_is_the_others_cause(stage: int) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(uncaught, 2, stage, timeout=60)
    assert "PeerError: rank 1 failed: ValueError: the user's hook fails (" in failed.value.failures[0]
    assert failed.value.failures[1].rstrip().endswith("ValueError: the user's hook fails")


def double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


def refused(stage: int) -> tuple[str, float]:
    """The last rank's pass fails when autograd is done, where the engine takes a gradient that a hook has changed."""
    engine = training.start(Run(accumulation=2), stage)
    failing = dist.get_rank() == dist.get_world_size() - 1
    loss_of(engine, 0).backward()
    engine.step()
    if failing:
        first = engine.module.embedding.weight  # its gradient is the last one of a pass
        first.register_post_accumulate_grad_hook(double)
    began = time.monotonic()
    message = "no error"
    try:
        loss_of(engine, 1).backward()
        engine.step()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    held = time.monotonic() - began
    store = dist.distributed_c10d._get_default_store()
    store.add("freed", 0 if failing else 1)
    while failing and store.add("freed", 0) == 0 and time.monotonic() - began < 20.0:
        time.sleep(0.1)
    return message, held


@pytest.mark.parametrize("stage", (1, *(pytest.param(s, marks=pytest.mark.soak) for s in (0, 2, 3))))
def test_a_pass_that_fails_at_its_end_fails_on_every_rank_with_the_cause(stage: int) -> None:
    (theirs, held), (ours, _) = run_ranks(refused, 2, stage, timeout=60)
    assert ours.startswith("PartitionError: a post-accumulate-grad hook changed"), ours
    assert theirs.startswith("PeerError: rank 1 failed: PartitionError: a post-accumulate-grad hook changed"), theirs
    assert held < 10.0, held
