"""Scripts that set an optimizer's states: before the first step, to another parameter's, of another shape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from script_bench import WIDTH, Scripts, Workbench, mlp
from script_optimizers import listed, steps
from torch import nn

script = Scripts()
LOOKS: dict[str, Callable[[Any, Any], int]] = {
    "length": lambda states, t: len(states),
    "list": lambda states, t: len(list(states)),
    "keys": lambda states, t: len(states.keys()),
    "dict": lambda states, t: len(dict(states)),
    "unpacked": lambda states, t: len({**states}),
    "copy": lambda states, t: len(copy.copy(states)),
    "deep copy": lambda states, t: len(copy.deepcopy(states)),
    "found": lambda states, t: sum(p in states for p in listed(t)),
}


def alike(bench: Workbench, kind: str = "adamw") -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A trainer after two steps, and two of its listed tensors, of parameters of one shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(bench.dtype)
    t = bench.trainer(model, kind=kind, lr=0.01)
    steps(bench, t, 2)
    first, _, second, *_ = listed(t)
    return t, first, second


@script
def swaps_two_states(bench: Workbench) -> None:
    t, p, q = alike(bench)
    states = t.optimizer.state
    states[p], states[q] = states[q], states[p]
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def shares_a_moment(bench: Workbench) -> None:
    t, p, q = alike(bench)
    t.optimizer.state[p]["exp_avg"] = t.optimizer.state[q]["exp_avg"]
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def copies_a_moment(bench: Workbench) -> None:
    t, p, q = alike(bench)
    t.optimizer.state[p]["exp_avg"] = t.optimizer.state[q]["exp_avg"].clone()
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def sets_moments_of_full_shape(bench: Workbench) -> None:
    t, _, _ = alike(bench)
    for full, p in zip(t.module.parameters(), listed(t), strict=True):
        t.optimizer.state[p]["exp_avg"] = torch.zeros(full.shape, dtype=torch.float64)
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def sets_momentum_before_the_first_step(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    for p in listed(t):
        t.optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 0.1)
    steps(bench, t, 3)
    bench.keep(t)


@script
def sets_adams_states_before_the_first_step(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype), kind="adamw", lr=0.01)
    for p in listed(t):
        state = t.optimizer.state[p]
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.full_like(p, 0.1)
        state["exp_avg_sq"] = torch.full_like(p, 0.2)
    steps(bench, t, 3)
    bench.keep(t)


@script
def sets_whole_states_before_the_first_step(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype), kind="adamw", lr=0.01)
    for p in listed(t):
        moments = {"exp_avg": torch.full_like(p, 0.1), "exp_avg_sq": torch.full_like(p, 0.2)}
        t.optimizer.state[p] = {"step": torch.tensor(5.0), **moments}
    steps(bench, t, 3)
    bench.keep(t)


@script
def deletes_the_momentum(bench: Workbench) -> None:
    t, _, _ = alike(bench, "sgd")
    for p in listed(t):
        del t.optimizer.state[p]["momentum_buffer"]
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def pops_the_momentum(bench: Workbench) -> None:
    t, _, _ = alike(bench, "sgd")
    for p in listed(t):
        t.optimizer.state[p].pop("momentum_buffer")
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def counts_the_states(bench: Workbench) -> None:
    for name, count in LOOKS.items():
        t = bench.trainer(mlp(dtype=bench.dtype), kind="adamw", lr=0.01)
        steps(bench, t, 1)
        bench.values[name] = torch.tensor(float(count(t.optimizer.state, t)))
