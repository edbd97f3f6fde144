"""What user code does to a model and its optimizer, drawn by a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from action_alone import ALONE
from action_cases import JOINS_AT, Case, Mistake, batch, parameter_number
from action_kinds import Action, Instead, evaluated, micro_batches, step_with
from action_passes import PASSES
from action_runs import Run


def draw(case: Case) -> Iterator[Action]:
    """The case's actions, in order; a checkpoint is loaded only after it was saved."""
    rng = random.Random(f"actions {case.seed}")
    saved: list[int] = []
    joined = case.late == "none"
    kinds = ("train", "train", "skip", "read", "evaluate", "write", "write", "clip", "gradient", "freeze", "rate")
    kinds += ("save", "load", "deepcopy", "join", "fail")
    if case.has_new_actions:
        kinds += ("rewrite", "rewrite", "halve", "forget", "zeros", *PASSES, *ALONE)
    for position in range(rng.randint(3, 10)):
        kind = rng.choice(kinds)
        number = 10 * position
        if kind == "load" and not saved:
            kind = "save"
        if kind == "join" and joined:
            kind = "train"
        if kind == "skip" and case.accumulation > 1:
            kind = "train"
        if kind == "save":
            saved.append(position)
            yield Action(f"save slot {position}", lambda run, slot=position: run.save(slot))
        elif kind == "load":
            chosen = rng.choice(saved)
            yield Action(f"load slot {chosen}", lambda run, slot=chosen: run.load(slot))
        elif kind == "join":
            joined = True
            yield Action("add_param_group", join)
        else:
            yield MAKERS[kind](rng, number)
    yield MAKERS["train"](rng, 990)
    yield MAKERS["read"](rng, 0)


def join(run: Run) -> None:
    """Gradual unfreezing: the late parameter gets a group of its own, unless it has one."""
    weight = run.model.late.weight
    before = weight.requires_grad
    weight.requires_grad_(True)
    if run.case.late == "listed":
        return
    try:
        run.optimizer.add_param_group({"params": [weight], "lr": JOINS_AT})
    except Exception:
        weight.requires_grad_(before)
        raise


def make_train(_rng: random.Random, number: int) -> Action:
    return Action("train", lambda run: micro_batches(run, number), trains=True)


def make_skip(rng: random.Random, number: int) -> Action:
    how = rng.choice(("engine", "optimizer", "model"))

    def skip(run: Run) -> None:
        run.backward(run.forward(number))
        run.discard(how)

    return Action(f"skip a batch by {how}.zero_grad()", skip)


def make_read(_rng: random.Random, _number: int) -> Action:
    return Action("read", lambda run: None)


def make_evaluate(_rng: random.Random, number: int) -> Action:
    return Action("evaluate", lambda run: evaluated(run, number))


def make_write(rng: random.Random, _number: int) -> Action:
    return write_by(rng.choice(WAYS), rng)


def make_rewrite(rng: random.Random, _number: int) -> Action:
    return write_by(rng.choice((*WAYS, "alias", "alias", "load_state_dict", "load_state_dict")), rng)


def write_by(how: str, rng: random.Random) -> Action:
    which, seed = rng.randrange(100), rng.randrange(1000)

    def write(run: Run, how: str = how) -> None:
        shape = parameter_number(run.model, which).shape
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2
        run.write(how, which, value)

    in_block = "gathered data" if how == "copy" else "gathered in place"
    instead = Instead(lambda run: write(run, in_block), lambda run: write(run, in_block))
    return Action(f"write parameter {which}: {how}", write, instead=instead)


def make_clip(rng: random.Random, number: int) -> Action:
    how = rng.choice(("engine", "norm", "value"))
    bound = rng.choice((1e-3, 1e-2, 10.0))
    name = f"clip by {how} to {bound}"
    return step_with(number, name, lambda run: run.clip(how, bound), lambda run: run.clip("engine", bound))


def make_gradient(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def assign(run: Run) -> None:
        parameter = parameter_number(run.model, which)
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25)

    return step_with(number, f"assign .grad of parameter {which}", assign)


def make_halve(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def halve(run: Run) -> None:
        gradient = parameter_number(run.model, which).grad
        if gradient is not None:
            gradient.mul_(0.5)

    return step_with(number, f"halve .grad of parameter {which}", halve, lambda run: run.halve_gradient(which))


def make_forget(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def forget(run: Run) -> None:
        parameter_number(run.model, which).grad = None

    return step_with(number, f".grad of parameter {which} = None", forget)


def make_zeros(rng: random.Random, number: int) -> Action:
    how = rng.choice(("engine", "optimizer", "model"))
    return step_with(
        number, f"step with zeros by {how}.zero_grad(False)", lambda run: run.discard(how, set_to_none=False)
    )


def make_freeze(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def freeze(run: Run) -> None:
        parameter = parameter_number(run.model, which)
        if not parameter.requires_grad:
            return
        parameter.requires_grad_(False)
        try:
            micro_batches(run, number)
        finally:
            parameter.requires_grad_(True)

    return Action(f"freeze parameter {which} for a step", freeze, trains=True)


def make_rate(rng: random.Random, _number: int) -> Action:
    rate = rng.choice((1e-3, 5e-2))

    def set_rate(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = rate

    return Action(f"lr = {rate}", set_rate)


def make_deepcopy(_rng: random.Random, number: int) -> Action:
    def copied(run: Run) -> torch.Tensor:
        twin = copy.deepcopy(run.model)
        with torch.no_grad():
            return twin(*batch(run.case, number, dist.get_rank(), dist.get_world_size()))

    return Action("deepcopy", copied)


def make_fail(rng: random.Random, number: int) -> Action:
    where = rng.choice(("forward", "backward"))
    which = rng.randrange(100)

    def fail(run: Run) -> None:
        block = run.model.blocks[which % len(run.model.blocks)]
        block.fails = where == "forward"
        handle = None
        if where == "backward":
            handle = block.register_full_backward_hook(raise_mistake)
        try:
            run.backward(run.forward(number))
        except Mistake:
            run.discard("engine")
        else:
            raise LookupError("the user's mistake was not raised")
        finally:
            block.fails = False
            if handle is not None:
                handle.remove()

    return Action(f"catch a failure in {where} of block {which}", fail)


def raise_mistake(*_: Any) -> None:
    raise Mistake("the user's backward hook fails")


WAYS = ("in place", "gathered in place", "gathered data", "vector", "data", "copy", "set_full_param")

MAKERS: dict[str, Callable[[random.Random, int], Action]] = {
    "train": make_train,
    "skip": make_skip,
    "read": make_read,
    "evaluate": make_evaluate,
    "write": make_write,
    "rewrite": make_rewrite,
    "clip": make_clip,
    "gradient": make_gradient,
    "halve": make_halve,
    "forget": make_forget,
    "zeros": make_zeros,
    "freeze": make_freeze,
    "rate": make_rate,
    "deepcopy": make_deepcopy,
    "fail": make_fail,
    **PASSES,
    **ALONE,
}
