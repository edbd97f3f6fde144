"""Scripts that work on what the optimizer lists and keeps: its param groups, its states, its hooks."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from script_bench import Scripts, Workbench, mlp
from torch import nn

script = Scripts()


def steps(bench: Workbench, t: Any, count: int = 2, first: int = 0) -> None:
    for step in range(first, first + count):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(100 + step)))
        t.step()


def listed(t: Any) -> Iterator[nn.Parameter]:
    for group in t.optimizer.param_groups:
        yield from group["params"]


def adamw(bench: Workbench) -> Any:
    """A trainer that has made three steps."""
    t = bench.trainer(mlp(dtype=bench.dtype), kind="adamw", lr=0.01)
    steps(bench, t, 3)
    return t


@script
def clips_what_the_groups_list(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        torch.nn.utils.clip_grad_norm_(list(listed(t)), 0.05)
        t.step()
    bench.keep(t)


@script
def scales_the_gradients_of_what_the_groups_list(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        for p in listed(t):
            if p.grad is not None:
                p.grad.data.mul_(0.5)
        t.step()
    bench.keep(t)


@script
def assigns_gradients_to_what_the_groups_list(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(50)))
        for p in listed(t):
            p.grad = torch.ones_like(p) * 0.1
        t.step()
    bench.keep(t)


@script
def clamps_what_the_groups_list(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    for step in range(3):
        steps(bench, t, 1, first=step)
        for p in listed(t):
            p.data.clamp_(-0.1, 0.1)
    steps(bench, t, 1)
    bench.keep(t)


@script
def decays_by_foreach_over_the_groups(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    for step in range(3):
        steps(bench, t, 1, first=step)
        with torch.no_grad():
            torch._foreach_mul_(list(listed(t)), 0.9)
    steps(bench, t, 1)
    bench.keep(t)


@script
def averages_what_the_groups_list(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    average = [p.detach().clone() for p in listed(t)]
    for step in range(3):
        steps(bench, t, 1, first=step)
        for kept, p in zip(average, listed(t), strict=True):
            kept.mul_(0.9).add_(p.detach(), alpha=0.1)
    with torch.no_grad():
        for kept, p in zip(average, listed(t), strict=True):
            p.copy_(kept)
    steps(bench, t, 1)
    bench.keep(t)


@script
def freezes_what_a_group_lists(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    steps(bench, t)
    for p in listed(t):
        p.requires_grad = False
    t.module[4].bias.requires_grad_(True)
    steps(bench, t)
    bench.keep(t)


@script
def unscales_by_a_gradient_scaler(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        t.backward(scaler.scale(F.mse_loss(t(bench.rows(step)), bench.rows(50))))
        scaler.unscale_(t.optimizer)
        t.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    bench.keep(t)


@script
def lists_the_models_parameters_again(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    steps(bench, t)
    t.optimizer.param_groups[0]["params"] = list(t.module.parameters())
    steps(bench, t)
    bench.keep(t)


@script
def clips_values_in_a_step_hook(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    t.optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(list(listed(t)), 0.01))
    steps(bench, t, 3)
    bench.keep(t)


@script
def clips_the_norm_in_a_step_hook(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(list(listed(t)), 0.01)

    t.optimizer.register_step_pre_hook(clip)
    steps(bench, t, 3)
    bench.keep(t)


@script
def clamps_in_a_step_hook(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for p in listed(t):
                p.clamp_(-0.1, 0.1)

    t.optimizer.register_step_post_hook(clamp)
    steps(bench, t, 3)
    bench.keep(t)


@script
def forgets_the_state_of_one_parameter(bench: Workbench) -> None:
    t = adamw(bench)
    t.optimizer.state.pop(t.module[2].weight, None)
    steps(bench, t)
    bench.keep(t)


@script
def replaces_the_state_of_one_parameter(bench: Workbench) -> None:
    t = adamw(bench)
    t.optimizer.state[t.module[2].weight] = {}
    steps(bench, t)
    bench.keep(t)


@script
def halves_moments_by_parameter(bench: Workbench) -> None:
    t = adamw(bench)
    for p in t.module.parameters():
        if p in t.optimizer.state:
            t.optimizer.state[p]["exp_avg"].mul_(0.5)
    steps(bench, t)
    bench.keep(t)


@script
def halves_moments_found_by_get(bench: Workbench) -> None:
    t = adamw(bench)
    for p in t.module.parameters():
        if state := t.optimizer.state.get(p):
            state["exp_avg"].mul_(0.5)
    steps(bench, t)
    bench.keep(t)


@script
def halves_all_moments(bench: Workbench) -> None:
    t = adamw(bench)
    for state in t.optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"] = state["exp_avg_sq"] * 0.5
    steps(bench, t)
    bench.keep(t)


@script
def edits_the_tensors_of_a_state_dict(bench: Workbench) -> None:
    t = adamw(bench)
    for state in t.optimizer.state_dict()["state"].values():
        state["exp_avg"].mul_(0.5)
    steps(bench, t)
    bench.keep(t)


@script
def writes_what_it_has_assigned(bench: Workbench) -> None:
    t = adamw(bench)
    kept = []
    for state in t.optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        state["exp_avg_sq"] = given = torch.ones_like(state["exp_avg_sq"])
        kept.append(given)
    for given in kept:
        given.add_(0.5)
    read = copy.deepcopy([state["exp_avg_sq"] for state in t.optimizer.state.values()])
    assert all((values == 1.5).all() for values in read)
    for given in kept:
        given.mul_(0.5)
    steps(bench, t)
    bench.keep(t)


@script
def edits_moments_by_views_and_lists(bench: Workbench) -> None:
    t = adamw(bench)
    kept = [state["exp_avg"] for state in t.optimizer.state.values()]
    steps(bench, t, 1, first=3)
    torch._foreach_mul_(kept, 0.5)  # what was taken before the step is what the step has updated
    for state in t.optimizer.state.values():
        state["exp_avg"].view(-1)[:].data.add_(0.01)
        torch.mul(state["exp_avg_sq"], 2.0, out=state["exp_avg_sq"])
        state["step"] += 3
        state["step"].fill_(float(state["step"]) + 1)
    states = copy.deepcopy([state["exp_avg"] for state in t.optimizer.state.values()])
    assert all(map(torch.equal, states, copy.deepcopy(kept)))
    steps(bench, t, first=4)
    bench.keep(t)


@script
def goes_back_to_a_copy_of_the_states(bench: Workbench) -> None:
    t = adamw(bench)
    copied = copy.deepcopy({"kept": dict(t.optimizer.state)})["kept"]
    steps(bench, t)
    for state, kept in zip(t.optimizer.state.values(), copied.values(), strict=True):
        state.update({kind: value.clone() for kind, value in kept.items()})
    steps(bench, t)
    removed = [t.optimizer.state.pop(p) for p in list(t.optimizer.state)]
    assert removed and not t.optimizer.state
    steps(bench, t)
    bench.keep(t)


@script
def sets_a_dict_of_copied_states(bench: Workbench) -> None:
    t = adamw(bench)
    copied = {p: {kind: v.clone() for kind, v in state.items()} for p, state in t.optimizer.state.items()}
    steps(bench, t)
    t.optimizer.state = defaultdict(dict, copied)
    steps(bench, t)
    bench.keep(t)


@script
def clears_all_states(bench: Workbench) -> None:
    t = adamw(bench)
    t.optimizer.state.clear()
    steps(bench, t)
    bench.keep(t)


@script
def sets_a_new_dict_of_states(bench: Workbench) -> None:
    t = adamw(bench)
    t.optimizer.state = defaultdict(dict)
    steps(bench, t)
    bench.keep(t)


@script
def goes_back_to_a_saved_state(bench: Workbench) -> None:
    t = adamw(bench)
    saved = io.BytesIO()
    torch.save(t.optimizer.state_dict(), saved)
    with t.gathered(list(t.module.parameters())):
        weights = {name: value.clone() for name, value in t.module.state_dict().items()}
    copied = copy.deepcopy(t.optimizer)
    steps(bench, t)
    saved.seek(0)
    t.optimizer.load_state_dict(torch.load(saved, weights_only=True))
    with t.gathered(list(t.module.parameters()), modifier_rank=0):
        t.module.load_state_dict(weights)
    steps(bench, t)
    bench.values["groups"] = torch.tensor(float(len(copied.param_groups)))
    bench.keep(t)


@script
def steps_with_a_closure(bench: Workbench) -> None:
    t = bench.trainer(mlp(dtype=bench.dtype))
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            t.optimizer.zero_grad()
            loss = F.mse_loss(t(bench.rows(step)), bench.rows(50))
            t.backward(loss)
            return loss

        (t.optimizer if bench.plain else t.engine).step(closure)
    bench.keep(t)
