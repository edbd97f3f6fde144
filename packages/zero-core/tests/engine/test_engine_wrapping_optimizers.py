"""Optimizers around another optimizer: refused by name, with what to write instead, which does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import adamw, build, config, distance, outcome, plain, train, weights, without
from torch import nn
from torch.optim import Optimizer

import zero_core
from zero_comm import run_ranks


class Lookahead(Optimizer):
    """arXiv 1907.08610, around any optimizer, as such classes are written."""

    def __init__(self, inner: Optimizer, every: int = 2, share: float = 0.5) -> None:
        self.inner, self.every, self.share, self.steps = inner, every, share, 0
        super().__init__(inner.param_groups, {})
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % self.every == 0:
            for group, slow in zip(self.inner.param_groups, self.slow, strict=True):
                for p, kept in zip(group["params"], slow, strict=True):
                    p.copy_(kept.lerp_(p, self.share))


class Adopting(Lookahead):
    """Lookahead without a base of its own: it takes over the other's groups and states."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}


class Both(Optimizer):
    """Two optimizers in one."""

    def __init__(self, *inner: Optimizer) -> None:
        super().__init__([group for one in inner for group in one.param_groups], {})
        self.inner = list(inner)

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


class Delegate:
    """No `torch.optim.Optimizer`."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self) -> None:
        self.inner.step()


def looking_ahead(model: nn.Module) -> Optimizer:
    """Return the optimizer that the refusal advises: the inner one, with a hook after its step."""
    optimizer = adamw(model)

    @torch.no_grad()
    def look_ahead(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                slow = optimizer.state[p].setdefault("slow", p.detach().clone())
                if group["steps"] % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    optimizer.register_step_post_hook(look_ahead)
    return optimizer


def two(model: nn.Module) -> Optimizer:
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if not any(p is q for q in head)]
    return Both(torch.optim.AdamW(rest), torch.optim.SGD(head, lr=0.1))


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "Lookahead wraps AdamW as 'inner'": lambda model: Lookahead(adamw(model)),
    "Adopting wraps AdamW as 'inner'": lambda model: Adopting(adamw(model)),
    "Both wraps AdamW and SGD as 'inner'": two,
    "got Delegate": lambda model: Delegate(adamw(model)),
}


@pytest.mark.parametrize("told", WRAPPED)
def test_an_optimizer_around_another_is_refused_with_what_to_write(told: str, alone: None) -> None:
    model = build()
    optimizer = WRAPPED[told](model)
    settings = without(config(1), "optimizer")
    refusal = outcome(lambda: zero_core.initialize(model=model, optimizer=optimizer, config=settings))
    assert told in refusal and "register_step_post_hook" in refusal


def ahead(stages: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in stages:
        model = build()
        settings = without(config(stage), "optimizer")
        engine = zero_core.initialize(model=model, optimizer=looking_ahead(model), config=settings)[0]
        train(engine, 0, 4)
        found.append(weights(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(2, (0, 3)), (1, (1, 2))])
def test_lookahead_by_a_step_hook_is_that_of_one_process(world_size: int, stages: tuple[int, ...]) -> None:
    reference = build()
    plain(reference, looking_ahead(reference), 0, 4)
    for answers in run_ranks(ahead, world_size, stages):
        for ours in answers:
            assert distance(ours, weights(reference)) <= 1e-12
