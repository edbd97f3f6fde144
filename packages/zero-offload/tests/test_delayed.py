"""The delayed update: weights one step late, with a trajectory that is stated and held."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import GROUPS, NUMELS, Lender, gradient, plans, same_states, states_of, update_of
from torch import nn

from zero_nvme_aio.testing import Delay, Fail, faulty_engine
from zero_offload import DelayedUpdate, HostBudget, OffloadedOptimizer, OffloadError, ShardError, TierOptions


def delayed_of(
    lender: Lender, dtype: torch.dtype, tier_options: TierOptions | None = None, **more: Any
) -> DelayedUpdate:
    return DelayedUpdate(plans(dtype), "AdamW", lambda: GROUPS, lender, tier_options, device="cpu", **more)


def gradient_at(lender: Lender, step: int, shard: str) -> torch.Tensor:
    return gradient(step, shard) + 0.1 * lender.tensors[shard].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_taken_one_update_before_they_are_applied(tmp_path: Path, dtype: torch.dtype) -> None:
    """m[t+1] = u(m[t], g(w[t])) and w[t+1] = m[t], with the same kernels, to the bit."""
    reads = Lender(dtype)  # what forward reads without delay in the reference: always one update behind
    masters = Lender(dtype)
    want: list[torch.Tensor] = []
    with update_of(masters, plans(dtype), gradients="caller") as update:
        for step in range(5):
            want.append(reads.flat())
            gradients = {shard: gradient_at(reads, step, shard) for shard in NUMELS}
            reads.tensors = {shard: tensor.clone() for shard, tensor in masters.tensors.items()}
            update.step(grad_scale=0.5, gradients=gradients)
        last = masters.flat()
        want_states = states_of(update)
    lender = Lender(dtype)
    tier_options = TierOptions(tier="nvme", path=tmp_path, sub_group_size=8192, buffer_count=2)
    delayed = delayed_of(lender, dtype, tier_options)
    assert delayed.memory() == delayed.plan
    for step in range(5):
        assert torch.equal(lender.flat(), want[step]), step
        for shard in NUMELS:
            delayed.add_gradient(shard, gradient_at(lender, step, shard))
        delayed.step(grad_scale=0.5)
    delayed.finish()
    delayed.finish()
    assert torch.equal(lender.flat(), last)
    assert same_states(dict(delayed.states()), want_states)
    delayed.close()


def test_the_step_runs_beside_what_follows(tmp_path: Path) -> None:
    lender = Lender(torch.bfloat16)
    with faulty_engine(Delay(on=("write",), seconds=0.02)) as engine:
        tier_options = TierOptions(
            tier="nvme", path=tmp_path, sub_group_size=4096, buffer_count=1, pipeline_write=False, engine=engine
        )
        delayed = delayed_of(lender, torch.bfloat16, tier_options)
        before = lender.flat()
        delayed.add_gradient("first", gradient(0, "first"))
        delayed.step()
        assert any(thread.name.startswith("zero-offload delayed update") for thread in threading.enumerate())
        assert not delayed.has_gradient("first")
        delayed.add_gradient("first", gradient(1, "first"))  # the next backward collects while the step runs
        assert delayed._running is not None and not delayed._running.done()
        assert torch.equal(lender.flat(), before)
        delayed.finish()
        assert not torch.equal(lender.flat(), before)
        with delayed.gradient("first") as kept:
            assert torch.equal(kept, gradient(1, "first"))
        delayed.close()


def test_weights_written_in_between_win() -> None:
    lender = Lender(torch.bfloat16)
    delayed = delayed_of(lender, torch.bfloat16)
    for shard in NUMELS:
        delayed.add_gradient(shard, gradient(0, shard))
    delayed.step()
    lender.tensors["first"].fill_(2.0)
    delayed.weights_changed("first")
    delayed.finish()
    assert bool((lender.tensors["first"] == 2.0).all())
    delayed.add_gradient("first", torch.zeros(NUMELS["first"]))
    delayed.step(grad_scale=0.0)
    delayed.finish()
    assert float(lender.tensors["first"][:29_088].float().sub(2.0).abs().max()) < 0.05
    delayed.close()


def test_a_step_that_failed_comes_up_in_the_next(tmp_path: Path) -> None:
    lender = Lender(torch.bfloat16)
    with faulty_engine(Fail(on=("write",), first=2, error=errno.EIO)) as engine:
        tier_options = TierOptions(tier="nvme", path=tmp_path, sub_group_size=4096, buffer_count=1, engine=engine)
        delayed = delayed_of(lender, torch.bfloat16, tier_options)
        delayed.add_gradient("first", gradient(0, "first"))
        delayed.step()
        with pytest.raises(ShardError, match="cannot write"):
            delayed.finish()
        delayed.add_gradient("first", gradient(1, "first"))
        delayed.step()
        with pytest.raises(OffloadError, match="load a saved state first"):
            delayed.finish()
        delayed.reset()
        assert not dict(delayed.states())
        delayed.close()


def test_the_optimizer_of_a_model_may_be_delayed() -> None:
    def weights(model: nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    def make() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 30)).double()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return (model(x) - x).square().mean()

    reads, masters = make(), make()
    theirs = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.9)
    for step in range(20):
        reads.zero_grad()
        loss(reads, step).backward()
        late = {name: tensor.clone() for name, tensor in masters.state_dict().items()}
        for master, read in zip(masters.parameters(), reads.parameters(), strict=True):
            master.grad = read.grad
        theirs.step()
        schedule.step()
        reads.load_state_dict(late)
    model = make()
    budget = HostBudget()
    with OffloadedOptimizer(model, lr=1e-2, gradients="host", delayed=True, budget=budget) as optimizer:
        assert {need.purpose for need in budget.needs} >= {"two sets of gradients", "weights that wait for their step"}
        mine = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(20):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
            mine.step()
        assert float((weights(model) - weights(reads)).abs().max()) < 1e-12
        optimizer.finish()
        assert float((weights(model) - weights(masters)).abs().max()) < 1e-12
    with pytest.raises(ValueError, match="delayed: expected gradients='host'"):
        OffloadedOptimizer(make(), delayed=True)


def test_finishing_where_no_step_runs_leaves_a_forward_pass_usable() -> None:
    model = nn.Linear(3, 2)
    x = torch.ones(1, 3, requires_grad=True)
    with OffloadedOptimizer(model, lr=1e-2, gradients="host", delayed=True) as optimizer:
        for _ in range(2):
            optimizer.finish()
            loss = model(x).sum()
            optimizer.state_dict()  # which calls `finish`
            loss.backward()
            optimizer.step()
        loss = model(x).sum()
        optimizer.finish()  # writes weights
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
