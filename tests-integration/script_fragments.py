"""Scripts that take what the optimizer lists and keeps for whole parameters: means, branches, places, shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from script_bench import Scripts, Workbench, mlp
from script_optimizers import listed, steps
from torch import nn

script = Scripts()


def hooked(bench: Workbench, work: Callable[[nn.Parameter], None], *, before: bool = False) -> None:
    """Train with ``work`` done to each listed tensor in a step hook."""
    t = bench.trainer(mlp(dtype=bench.dtype))

    @torch.no_grad()
    def hook(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                work(p)

    (t.optimizer.register_step_pre_hook if before else t.optimizer.register_step_post_hook)(hook)
    steps(bench, t, 3)
    bench.keep(t)


def on_states(bench: Workbench, work: Callable[[torch.Tensor], Any]) -> None:
    """Train with ``work`` done to all momentum buffers after two steps."""
    t = bench.trainer(mlp(dtype=bench.dtype))
    steps(bench, t, 2)
    with torch.no_grad():
        for state in t.optimizer.state.values():
            work(state["momentum_buffer"])
    steps(bench, t, 2, 2)
    bench.keep(t)


def with_model(bench: Workbench, work: Callable[[nn.Module, dict[str, torch.Tensor]], None], *, before: bool) -> None:
    """Train with ``work`` done to the model itself, and to tensors of the script's own, in a step hook."""
    model = mlp(dtype=bench.dtype)
    t = bench.trainer(model)
    kept: dict[str, torch.Tensor] = {}
    hook = torch.no_grad()(lambda *_: work(model, kept))
    (t.optimizer.register_step_pre_hook if before else t.optimizer.register_step_post_hook)(hook)
    steps(bench, t, 3)
    bench.keep(t)
    bench.values |= kept


def average_model(model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        kept[f"average {name}"] = kept.get(f"average {name}", torch.zeros_like(p)).lerp(p.detach(), 0.5)


def add_data(model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    kept["sum"] = kept.get("sum", torch.zeros(())) + sum(p.data.double().sum() for p in model.parameters())


def halve_gradients(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def assign_gradients(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def cancel_gradients(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    for p in model.parameters():
        p.grad = None


def clip_model(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def shrink_model(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    for p in model.parameters():
        p.mul_(0.9)


def shrink_data(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    for p in model.parameters():
        p.data.mul_(0.9)


def shrink_together(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.9)


def by_group(bench: Workbench, setting: Callable[[nn.Parameter], dict[str, Any]]) -> None:
    """Train with hyperparameters that are chosen after `initialize` by what each group's tensor is."""
    model = mlp(dtype=bench.dtype)
    t = bench.trainer(model, [{"params": [p]} for p in model.parameters()])
    for group in t.optimizer.param_groups:
        group.update(setting(group["params"][0]))
    steps(bench, t, 3)
    bench.keep(t)


def zero_above(p: nn.Parameter) -> None:
    if p.grad is not None and (p.grad.abs() > 0.01).any():
        p.grad.zero_()


def shrink_large(p: nn.Parameter) -> None:
    if (p > 0.3).any():
        p.mul_(0.9)


def keep_largest(p: nn.Parameter) -> None:
    if p.numel():
        p.mul_(p.abs() >= p.flatten().abs().topk(min(3, p.numel())).values[-1])


def centre_in_numpy(p: nn.Parameter) -> None:
    values = p.detach().cpu().numpy()
    values -= values.mean() if values.size else 0


def centre_rows(p: nn.Parameter) -> None:
    if p.dim() > 1 and p.grad is not None:
        p.grad.sub_(p.grad.mean(1, keepdim=True))


def sign_of_large(p: nn.Parameter) -> None:
    if p.grad is not None:
        p.grad = torch.where(p.grad.abs() > 1e-3, p.grad.sign() * 1e-3, p.grad.clone())


def decay_matrices(p: nn.Parameter) -> None:
    if p.grad is not None and p.ndim > 1:
        p.grad.add_(p, alpha=0.1)


def scale_by_size(p: nn.Parameter) -> None:
    if p.grad is not None:
        p.grad.div_(p.numel() ** 0.5 + p.shape[0] + len(p) + p.size(-1) + p.dim())


def follow_a_mask(p: nn.Parameter) -> None:
    mask = torch.ones_like(p)
    mask.masked_fill_(p.abs() < 0.05, 0.5)
    p.data.mul_(mask).clamp_(-0.3, 0.3)
    torch._foreach_mul_([p], 0.999)


def write_by_masks(p: nn.Parameter) -> None:
    p[p.abs() < 0.02] = 0
    p.view(-1)[:].mul_(0.99)
    p.flatten()[p.flatten() > 0.3] = 0.3
    p.data[...] *= 0.999


def add_drawn_numbers(p: nn.Parameter) -> None:
    p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(1)), alpha=0.01)


def zero_the_first(p: nn.Parameter) -> None:
    p[0] = 0


ALIKE = {
    "signs": (sign_of_large, True),
    "decay of matrices": (decay_matrices, True),
    "scales by size": (scale_by_size, True),
    "masks": (follow_a_mask, False),
    "writes by masks": (write_by_masks, False),
}
REFUSED = {
    "data of gradients": (lambda p: None if p.grad is None else setattr(p.grad, "data", p.grad.data * 0.5), True),
    "centres": (lambda p: p.sub_(p.mean()), False),
    "centres by product": (lambda p: p.sub_(p.flatten() @ torch.ones(p.numel(), dtype=p.dtype) / p.numel()), False),
    "centres in numpy": (centre_in_numpy, False),
    "cumulative sums": (lambda p: p.copy_(p.flatten().cumsum(0).view_as(p) * 0.1), False),
    "branches after": (shrink_large, False),
    "keeps the largest": (keep_largest, False),
    "places": (zero_the_first, False),
    "found places": (lambda p: p.mul_(0.9 if len(torch.where(p > 0.2)[0]) else 1.0), False),
    "chosen by masks": (lambda p: p.mul_(p[p > 0].mean()), False),
    "rows": (lambda p: p.view(2, -1).mul_(0.9), False),
    "noise": (lambda p: p.add_(torch.randn_like(p), alpha=0.01), False),
    "drawn noise": (add_drawn_numbers, False),
    "branches before": (zero_above, True),
    "centred gradients": (lambda p: None if p.grad is None else p.grad.sub_(p.grad.mean()), True),
    "centred rows": (centre_rows, True),
    "medians": (lambda p: None if p.grad is None or not p.numel() else p.grad.sub_(p.grad.median()), True),
    "largest": (lambda p: None if p.grad is None else p.grad.div_(p.grad.abs().max() + 1), True),
}
MODEL = {
    "averages after": (average_model, False),
    "averages before": (average_model, True),
    "reads data after": (add_data, False),
    "halves gradients": (halve_gradients, True),
    "assigns gradients": (assign_gradients, True),
    "cancels gradients": (cancel_gradients, True),
    "clips gradients": (clip_model, True),
    "writes before": (shrink_model, True),
    "writes after": (shrink_model, False),
    "writes data before": (shrink_data, True),
    "writes data after": (shrink_data, False),
    "writes together after": (shrink_together, False),
}
STATES = {
    "halves": lambda state: state.mul_(0.5),
    "zeros": lambda state: state.zero_(),
}
REFUSED_STATES = {
    "norms": lambda state: state.div_(state.norm() + 1),
    "means": lambda state: state.sub_(state.mean()),
    "first rows": lambda state: state[0].zero_(),
    "noise": lambda state: state.add_(torch.randn_like(state)),
    "branches": lambda state: state.zero_() if (state.abs() > 0.01).any() else None,
}
GROUPS = {
    "decay by dimension": lambda p: {"weight_decay": 0.1 if p.ndim > 1 else 0.0},
    "rate by rows": lambda p: {"lr": 0.1 / p.shape[0]},
    "rate by size": lambda p: {"lr": 1.0 / p.numel()},
}

for name, (work, before) in {**ALIKE, **REFUSED}.items():
    script[f"in a hook: {name}"] = lambda bench, work=work, before=before: hooked(bench, work, before=before)
for name, (use, before) in MODEL.items():
    script[f"the model in a hook: {name}"] = lambda bench, use=use, before=before: with_model(bench, use, before=before)
for name, work in {**STATES, **REFUSED_STATES}.items():
    script[f"all states: {name}"] = lambda bench, work=work: on_states(bench, work)
for name, setting in GROUPS.items():
    script[f"groups: {name}"] = lambda bench, setting=setting: by_group(bench, setting)
EQUAL = [
    *(f"in a hook: {name}" for name in ALIKE),
    *(f"all states: {name}" for name in STATES),
    *(f"groups: {name}" for name in GROUPS),
    "halves_the_listed_states",
    "forgets_two_listed_states",
    "damps_by_the_count_of_steps",
    "pops_every_state",
    "shrinks_where_all_have_gradients",
    "zeroes_the_first_state",
    "averages_the_listed_weights",
]


@script
def halves_the_listed_states(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    steps(bench, t, 2)
    for p in listed(t):
        t.optimizer.state[p]["momentum_buffer"].mul_(0.5)
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def forgets_two_listed_states(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    steps(bench, t, 2)
    for p in list(listed(t))[:2]:
        t.optimizer.state.pop(p)
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def zeroes_the_first_state(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    steps(bench, t, 2)
    next(iter(t.optimizer.state.values()))["momentum_buffer"].zero_()
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def averages_the_listed_weights(bench: Workbench) -> None:
    """An average of what the groups list, taken between steps and put back in a hook."""
    t = bench.trainer(mlp(dtype=bench.dtype))
    average: list[torch.Tensor] = []

    @torch.no_grad()
    def follow(optimizer: Any, *_: Any) -> None:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        if not average:
            average.extend(p.detach().clone() for p in tensors)
        for mean, p in zip(average, tensors, strict=True):
            mean.lerp_(p, 0.1)
            p.copy_(mean)

    t.optimizer.register_step_post_hook(follow)
    steps(bench, t, 4)
    bench.keep(t)


@script
def damps_by_the_count_of_steps(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype), kind="adamw", lr=0.01)
    steps(bench, t, 2)
    for number in (0, -1):
        tensors = list(listed(t))
        if t.optimizer.state[tensors[number]]["step"] >= 2:
            for p in tensors:
                t.optimizer.state[p]["exp_avg"].mul_(0.5)
    steps(bench, t, 2, 2)
    bench.keep(t)


@script
def shrinks_where_all_have_gradients(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))

    @torch.no_grad()
    def shrink(optimizer: Any, *_: Any) -> None:
        tensors = optimizer.param_groups[0]["params"]
        if all(p.grad is not None for p in tensors):
            torch._foreach_mul_(tensors, 0.5)

    t.optimizer.register_step_post_hook(shrink)
    steps(bench, t, 2)
    bench.keep(t)


@script
def pops_every_state(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    steps(bench, t, 2)
    popped = 0
    while t.optimizer.state:
        t.optimizer.state.popitem()
        popped += 1
    assert popped == 6
    steps(bench, t, 2, 2)
    t.optimizer.state.clear()
    steps(bench, t, 2, 4)
    bench.keep(t)
