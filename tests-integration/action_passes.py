"""Actions about passes: several of them, other code between them, and weights that are frozen in between."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from action_cases import parameter_number
from action_kinds import Action, Instead, evaluated, micro_batches
from action_runs import Run


def all_but_the_step(run: Run, first: int) -> None:
    """The passes of one optimizer step."""
    for micro in range(run.case.accumulation):
        if micro:
            run.step(False)
        run.backward(run.forward(first + micro))


def make_own_backward(_rng: random.Random, number: int) -> Action:
    def train(run: Run) -> None:
        for micro in range(run.case.accumulation):
            run.own_backward(run.forward(number + micro))
            run.step(micro == run.case.accumulation - 1)

    return Action("train by loss.backward()", train, trains=True)


def make_two_passes(rng: random.Random, number: int) -> Action:
    both_first = rng.random() < 0.5

    def train(run: Run) -> None:
        for micro in range(run.case.accumulation):
            loss = run.forward(number + micro)
            if both_first:
                other = run.forward(number + micro + 5)
                run.backward(loss)
            else:
                run.backward(loss)
                other = run.forward(number + micro + 5)
            run.backward(other)
            run.step(micro == run.case.accumulation - 1)

    return Action(f"two backward passes, {'both forwards first' if both_first else 'by turns'}", train, trains=True)


def make_penalty(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def train(run: Run) -> None:
        for micro in range(run.case.accumulation):
            run.backward(run.penalised(run.forward(number + micro), which))
            run.step(micro == run.case.accumulation - 1)

    return Action(f"a penalty on parameter {which}", train, trains=True)


def make_evaluate_between(_rng: random.Random, number: int) -> Action:
    def train(run: Run) -> torch.Tensor:
        all_but_the_step(run, number)
        value = evaluated(run, number + 7)
        run.step(True)
        return value

    return Action("evaluate between backward and step", train, trains=True)


def make_skip_half(rng: random.Random, number: int) -> Action:
    how = rng.choice(("engine", "optimizer", "model"))

    def train(run: Run) -> None:
        for micro in range(run.case.accumulation):
            run.backward(run.forward(number + micro))
            if micro == 0:
                run.discard(how)
            run.step(micro == run.case.accumulation - 1)

    return Action(f"{how}.zero_grad() after the first backward of a step", train, trains=True)


def make_save_between(_rng: random.Random, number: int) -> Action:
    slot = f"between {number}"

    def save(run: Run) -> None:
        all_but_the_step(run, number)
        run.save(slot)
        run.step(True)
        run.load(slot)

    def save_after(run: Run) -> None:
        run.step(True)
        run.save(slot)
        run.load(slot)

    def save_after_the_step(run: Run) -> None:
        micro_batches(run, number)
        run.save(slot)
        run.load(slot)

    instead = Instead(save_after, save_after_the_step)
    return Action("save between backward and step, and load", save, trains=True, instead=instead)


def make_load_between(_rng: random.Random, number: int) -> Action:
    slot = f"before {number}"

    def load(run: Run) -> None:
        run.save(slot)
        all_but_the_step(run, number)
        run.load(slot)

    return Action("load between backward and step", load, trains=True)


def make_round_trip(_rng: random.Random, _number: int) -> Action:
    def load(run: Run) -> None:
        run.optimizer.load_state_dict(run.optimizer.state_dict())

    return Action("optimizer.load_state_dict(optimizer.state_dict())", load)


def make_toggle(rng: random.Random, _number: int) -> Action:
    which = rng.randrange(100)

    def toggle(run: Run) -> None:
        parameter = parameter_number(run.model, which)
        if parameter is not run.model.late.weight:
            parameter.requires_grad_(not parameter.requires_grad)

    return Action(f"freeze parameter {which}, or train it again", toggle)


PASSES: dict[str, Callable[[random.Random, int], Action]] = {
    "own backward": make_own_backward,
    "two passes": make_two_passes,
    "penalty": make_penalty,
    "evaluate between": make_evaluate_between,
    "skip half": make_skip_half,
    "save between": make_save_between,
    "load between": make_load_between,
    "round trip": make_round_trip,
    "toggle": make_toggle,
}
