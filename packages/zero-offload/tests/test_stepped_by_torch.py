"""Optimizers without a kernel, which torch steps on the host, slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import Lender, one_step, plans, same_states, states_of

from zero_offload import OffloadedUpdate, TierOptions

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
