"""Actions that one rank alone does before or in a step: no plain run has them, so every rank has to refuse them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from action_cases import parameter_number
from action_kinds import Action, Apply, micro_batches
from action_runs import Run, Sharded


def is_the_one(run: Run) -> bool:
    """Return whether this is the rank that does something alone, and not a reference."""
    return isinstance(run, Sharded) and dist.get_rank() == dist.get_world_size() - 1 > 0


def is_used(run: Run, parameter: torch.nn.Parameter) -> bool:
    """Return whether forward reads ``parameter``: where no rank has a gradient, one rank may write one."""
    return not run.case.unused or all(parameter is not p for p in run.model.unused.parameters())


def forget(run: Run) -> None:
    run.discard("engine")


def alone(name: str, step: Apply, give_up: Apply = forget) -> Action:
    return Action(f"{name} on one rank", step, trains=True, give_up=give_up)


def make_lone_write(rng: random.Random, number: int) -> Action:
    which, seed = rng.randrange(100), rng.randrange(1000)

    def step(run: Run) -> None:
        run.weights()  # what all ranks wrote before counts from here on, or the refusal takes it back too
        if is_the_one(run):
            parameter = parameter_number(run.model, which)
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(parameter)
        micro_batches(run, number)

    return alone(f"write parameter {which}", step)


def make_lone_rate(_rng: random.Random, number: int) -> Action:
    def step(run: Run) -> None:
        if is_the_one(run):
            run.optimizer.param_groups[0]["lr"] *= 2
        micro_batches(run, number)

    def give_up(run: Run) -> None:
        if is_the_one(run):
            run.optimizer.param_groups[0]["lr"] /= 2
        forget(run)

    return alone("twice the lr", step, give_up)


def make_lone_zero(rng: random.Random, number: int) -> Action:
    how = rng.choice(("engine", "optimizer", "model"))

    def zero(run: Run) -> None:
        if is_the_one(run):
            run.discard(how)

    return alone(f"{how}.zero_grad()", lambda run: micro_batches(run, number, zero))


def make_lone_gradient(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def assign(run: Run) -> None:
        parameter = parameter_number(run.model, which)
        if is_the_one(run) and parameter.requires_grad and is_used(run, parameter):
            parameter.grad = torch.full_like(parameter, 0.25)

    return alone(f"assign .grad of parameter {which}", lambda run: micro_batches(run, number, assign))


ALONE: dict[str, Callable[[random.Random, int], Action]] = {
    "lone write": make_lone_write,
    "lone rate": make_lone_rate,
    "lone zero": make_lone_zero,
    "lone gradient": make_lone_gradient,
}
