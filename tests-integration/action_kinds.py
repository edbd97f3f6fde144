"""The actions of random sequences, and the steps that most are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from action_runs import Run, Sharded

Apply = Callable[[Run], "torch.Tensor | None"]


@dataclass(frozen=True)
class Instead:
    """The way that a refusal names: ``here`` from where the engine refused, ``from_the_start`` for a reference."""

    here: Apply
    from_the_start: Apply


def skip_refused(run: Run) -> None:
    """Give up the gradients of a step that was refused, and end its accumulation."""
    run.discard("engine")
    if run.case.accumulation > 1:
        run.step(True)


@dataclass(frozen=True)
class Action:
    """One thing that user code does; ``apply`` does it to either run.

    ``trains``: it ends in a step. ``instead``: what its refusal says to do; None where that cannot be done any more.
    ``give_up``: how the engine continues without a step that was refused.
    """

    name: str
    apply: Apply
    trains: bool = False
    instead: Instead | None = None
    give_up: Apply = skip_refused


def micro_batches(run: Run, first: int, before_step: Apply | None = None) -> None:
    """One optimizer step; ``before_step`` runs between the last backward and the step."""
    for micro in range(run.case.accumulation):
        last = micro == run.case.accumulation - 1
        run.backward(run.forward(first + micro))
        if last and before_step is not None:
            before_step(run)
        run.step(last)


def step_with(number: int, name: str, before_step: Apply, way: Apply | None = None) -> Action:
    """A step in which ``before_step`` follows the last backward; ``way``: what to do instead if that is refused."""

    def here(run: Run) -> None:
        assert way is not None
        way(run)
        run.step(True)

    instead = None if way is None else Instead(here, lambda run: micro_batches(run, number, way))
    return Action(name, lambda run: micro_batches(run, number, before_step), trains=True, instead=instead)


def evaluated(run: Run, number: int) -> torch.Tensor:
    """The loss of this rank's rows without gradients."""
    if isinstance(run, Sharded):
        return run.evaluate(number)
    return run.evaluate(number, dist.get_rank(), dist.get_world_size())
