"""Optimizers without a kernel, which torch steps on the host, slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import FRAGMENTS, Lender, gradient, one_step, plans, same_states, states_of

from zero_offload import OffloadedUpdate, OffloadError, TierOptions

Make = Callable[[Any], torch.optim.Optimizer]


def made(make: Make, lender: Lender, dtype: torch.dtype, tier_options: TierOptions | None = None) -> OffloadedUpdate:
    """An update with the groups 0 and 1 of an optimizer, which has two param groups or one for both."""
    optimizer = make([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)])
    shards = plans(dtype, in_place=dtype == torch.float32)
    return OffloadedUpdate(shards, optimizer, lambda: optimizer.param_groups, lender, tier_options, device="cpu")


def in_six_slices(tier: str, path: Path) -> TierOptions:
    where = path if tier == "nvme" else None
    return TierOptions(tier=tier, path=where, sub_group_size=8192, buffer_count=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "Adamax"])
def test_masters_in_files_are_stepped_where_they_are_also_after_their_states_were_read(
    name: str, tmp_path: Path
) -> None:
    found = []
    for tier in ("host", "nvme"):
        lender = Lender(torch.bfloat16)
        with made(getattr(torch.optim, name), lender, torch.bfloat16, in_six_slices(tier, tmp_path)) as update:
            for step in range(4):
                one_step(update, step)
                states = states_of(update)  # as a save does: other slices are in the buffers then
            found.append((states, lender.flat()))
    assert same_states(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


class Momentum(torch.optim.Optimizer):
    """SGD with momentum that counts no steps, and whose first buffer is half the gradient."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["average"] = state["average"] * 0.9 + p.grad if "average" in state else p.grad / 2
                p.sub_(state["average"], alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moments_that_are_written_without_a_step_count_in_the_next_one(dtype: torch.dtype) -> None:
    found = []
    for loads in (False, True):
        lender = Lender(dtype)
        with made(Momentum, lender, dtype) as update:
            if not loads:
                one_step(update, 0)
                start, saved = {n: t.clone() for n, t in lender.tensors.items()}, states_of(update)
            else:
                lender.tensors = {name: tensor.clone() for name, tensor in start.items()}
                update.write({name: {k: v for k, v in state.items() if k != "step"} for name, state in saved.items()})
            one_step(update, 1)
            found.append(lender.flat())
    assert torch.equal(*found)


class Boosted(torch.optim.Optimizer):
    """Sums of gradients, with an option that a group may lack."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p].setdefault("total", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(total, alpha=group["lr"] * group.get("boost", 1.0))


@pytest.mark.parametrize("boosted", [0, 1])
def test_an_option_that_one_group_has_counts_in_that_group(boosted: int) -> None:
    lender, other = Lender(torch.float32), Lender(torch.float32)
    groups = ({"boost": 3.0} if number == boosted else {} for number in range(2))
    with made(
        lambda params: Boosted([p | g for p, g in zip(params, groups, strict=True)]), lender, torch.float32
    ) as update:
        one_step(update, 0, scale=1.0)
    for shard, fragments in FRAGMENTS.items():
        for plan in fragments:
            part = slice(plan.start, plan.start + plan.numel)
            factor = 0.1 * (3.0 if plan.group == boosted else 1.0)
            want = other.tensors[shard][part].sub(gradient(0, shard)[part], alpha=factor)
            assert torch.equal(lender.tensors[shard][part], want), plan.name


class Counting(torch.optim.Optimizer):
    """An optimizer of another project: it counts in Python, keeps a Python float, and with ``decays`` another one."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1, decays: bool = False) -> None:
        super().__init__(params, {"lr": lr, "decays": decays})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, product=1.0, seen=torch.zeros_like(p))
                    state.update({"decay": 1.0} if group["decays"] else {})
                state["step"] += 1
                state["product"] *= 0.9 + 0.01 / state["step"]
                if group["decays"]:
                    state["decay"] *= 0.7
                state["seen"].add_(p.grad)
                p.sub_(state["seen"] * state["product"] * state.get("decay", 1.0), alpha=group["lr"])


def counting(params: Any) -> torch.optim.Optimizer:
    return Counting([{**params[0], "decays": True}, params[1]])


def product_after(steps: int) -> float:
    product = 1.0
    for step in range(1, steps + 1):
        product *= 0.9 + 0.01 / step
    return product


def test_python_numbers_keep_their_type_and_bits_in_the_groups_that_have_them() -> None:
    lender = Lender(torch.float32)
    with made(counting, lender, torch.float32) as update:
        for step in range(3):
            one_step(update, step)
        for name, state in states_of(update).items():
            assert ("decay" in state) == (name not in ("norm", "bias")), name
            assert state["product"].item() == product_after(3), name
            assert set(update.numbers(name)) == set(state) - {"seen", "step"}
        with pytest.raises(ValueError, match="'norm': expected states among .*, got decay"):
            update.write({"norm": {"decay": torch.tensor(1.0)}})


@pytest.mark.parametrize("make", [counting, torch.optim.NAdam])
def test_numbers_that_are_written_count_at_the_same_step(make: Make) -> None:
    name = "product" if make is counting else "mu_product"
    found = []
    for rewritten in (False, True):
        lender = Lender(torch.float32)
        with made(make, lender, torch.float32) as update:
            for step in range(2):
                one_step(update, step)
                if rewritten and step == 0:
                    update.write({"matrix": {name: torch.tensor(0.25)}})
            found.append((states_of(update)["matrix"][name].item(), lender.flat()))
    assert found[0][0] != found[1][0] < 0.25
    assert not torch.equal(found[0][1], found[1][1])


class Refusing(Counting):
    """`Counting` that fails at a gradient with NaN."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.grad is not None and bool(p.grad.isnan().any()) for g in self.param_groups for p in g["params"]):
            raise ArithmeticError("NaN")
        super().step()


def test_numbers_of_a_step_that_failed_are_forgotten() -> None:
    lender = Lender(torch.float32)
    with made(Refusing, lender, torch.float32, TierOptions(sub_group_size=4096)) as update:
        fresh = update.numbers("embedding")
        for shard in FRAGMENTS:
            into, _ = update.borrow_gradient(shard)
            into.copy_(gradient(0, shard))
            if shard == "second":
                into[10:].fill_(torch.nan)
            update.give_back_gradient(shard)
        with pytest.raises(ArithmeticError):
            update.step()
        update.clear_gradients()
        update.reset()
        one_step(update, 1, absent={"embedding"})
        assert update.numbers("embedding") == fresh
        assert update.numbers("matrix") != fresh


def test_a_moment_that_was_not_written_with_the_others_is_an_error_and_no_zero() -> None:
    with made(torch.optim.Rprop, Lender(torch.float32), torch.float32) as update:
        one_step(update, 0)
        saved = states_of(update)
        update.reset()
        update.write({name: {"prev": state["prev"]} for name, state in saved.items()})
        with pytest.raises(OffloadError, match="Rprop keeps 'step_size', which the states that were loaded or written"):
            one_step(update, 1)
        update.clear_gradients()
        update.reset()
        for kind in ("prev", "step_size"):  # one after the other
            update.write({name: {kind: state[kind]} for name, state in saved.items()})
        one_step(update, 1)
        update.write({name: {"prev": state["prev"]} for name, state in saved.items()})
        update.restart(list(saved))
        for step in (2, 3):
            one_step(update, step)


class Replacing(torch.optim.Optimizer):
    """SGD that gives the parameter new memory."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_masters_keep_what_a_step_puts_into_other_memory(tier: str, tmp_path: Path) -> None:
    found = []
    for make in (Replacing, lambda params: torch.optim.SGD(params, lr=0.1, foreach=False)):
        lender = Lender(torch.bfloat16)
        with made(make, lender, torch.bfloat16, in_six_slices(tier, tmp_path)) as update:
            for step in range(4):
                one_step(update, step)
            found.append((lender.flat(), {name: state["master"] for name, state in states_of(update).items()}))
    assert torch.equal(found[0][0], found[1][0])
    assert all((found[0][1][name] - master).abs().max() < 1e-6 for name, master in found[1][1].items())


class Late(torch.optim.Optimizer):
    """SGD that keeps an average from its step ``begin`` on."""

    elementwise = True

    def __init__(self, params: Any, begin: int) -> None:
        super().__init__(params, {"begin": begin})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    if state["step"] >= group["begin"]:
                        state.setdefault("average", p.clone()).lerp_(p, 0.1)
                    p.sub_(p.grad, alpha=0.1)


def test_a_state_that_begins_in_the_second_step_is_refused() -> None:
    with pytest.raises(ValueError, match="Late makes 'average' in its second step"):
        made(lambda params: Late(params, 2), Lender(torch.float32), torch.float32)


def test_a_state_that_begins_later_is_an_error_in_that_step() -> None:
    with made(lambda params: Late(params, 3), Lender(torch.float32), torch.float32) as update:
        one_step(update, 0)
        one_step(update, 1)
        with pytest.raises(OffloadError, match="Late has begun to keep 'average' in step 3"):
            one_step(update, 2)
