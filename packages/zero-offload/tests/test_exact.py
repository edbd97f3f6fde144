"""The exact update beside backward and forward: the bits of the update that runs at the step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from exact_updates import backward, computed, exact_of
from shards import FRAGMENTS, GROUPS, NUMELS, Lender, plans, same_states, states_of, update_of

from zero_offload import OffloadedUpdate, OffloadError, TierOptions
from zero_optim_kernels.torch import CPUSGD, CPUAdagrad, CPUAdamW, CPULion

Factors = Callable[[int], float]
FACTORS: dict[str, Factors] = {
    "never clipped": lambda step: 1.0,
    "always clipped": lambda step: 0.25 + step / 1000,
    "alternating": lambda step: 1.0 if step % 2 else 0.3,
    "seldom clipped": lambda step: 0.5 if step % 7 == 3 else 1.0,
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": CPUAdamW([torch.zeros(1)]).defaults,
    "Adam": {**CPUAdamW([torch.zeros(1)]).defaults, "decoupled_weight_decay": False},
    "SGD": CPUSGD([torch.zeros(1)], lr=1e-2, momentum=0.9).defaults,
    "Adagrad": CPUAdagrad([torch.zeros(1)], lr=1e-2).defaults,
    "Lion": CPULion([torch.zeros(1)], lr=1e-3).defaults,
}


def groups_of(optimizer: str) -> list[dict[str, Any]]:
    return [{**OPTIMIZERS[optimizer], "lr": 1e-2, "weight_decay": 0.1}, {**OPTIMIZERS[optimizer], "lr": 3e-3}]


@pytest.mark.parametrize("way", FACTORS)
@pytest.mark.parametrize(
    ("dtype", "in_place", "state_dtype"),
    [
        (torch.float32, True, None),
        (torch.bfloat16, False, None),
        (torch.bfloat16, False, torch.int8),
        (torch.float16, False, torch.bfloat16),
        (torch.float64, True, None),
    ],
)
def test_bits_are_those_of_the_update_at_the_step(
    way: str, dtype: torch.dtype, in_place: bool, state_dtype: torch.dtype | None
) -> None:
    grads = torch.float64 if dtype == torch.float64 else torch.float32
    options = TierOptions(sub_group_size=8192, state_dtype=state_dtype)
    ours, theirs = Lender(dtype), Lender(dtype)
    update = exact_of(ours, dtype, options, in_place=in_place)
    with update_of(theirs, plans(dtype, in_place=in_place), options) as plain:
        for step in range(30):
            for one in (update, plain):
                backward(one, step, grads)
                if one is update and step % 3:
                    computed(update)
                absent = {"matrix"} if step % 11 == 5 else ()
                if step % 13 != 7:  # else the step is skipped, as for a gradient that is not finite
                    one.step(grad_scale=FACTORS[way](step), absent=absent)
                one.clear_gradients()
            for shard in NUMELS:
                update.await_update(shard)
                assert torch.equal(ours.tensors[shard], theirs.tensors[shard]), (step, shard)
        assert same_states(states_of(update), states_of(plain))
    assert update.rate.steps == 30
    assert (update.rate.committed > 0) == (way in ("never clipped", "seldom clipped", "alternating"))
    assert not ours.held
    update.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", FACTORS)
@pytest.mark.parametrize(("dtype", "in_place"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_that_are_read_at_once_are_written_when_the_step_returns(
    count: int, way: str, dtype: torch.dtype, in_place: bool
) -> None:
    options = TierOptions(sub_group_size=8192)
    ours, theirs = Lender(dtype), Lender(dtype)
    at_once = list(NUMELS)[:count]
    update = exact_of(ours, dtype, options, in_place=in_place, at_once=at_once)
    with update_of(theirs, plans(dtype, in_place=in_place), options) as plain:
        for step in range(12):
            for one in (update, plain):
                backward(one, step)
                if one is update and step % 3:
                    computed(update)
                one.step(grad_scale=FACTORS[way](step))
                one.clear_gradients()
            for shard in NUMELS:
                if shard in at_once:
                    assert not update.is_updating(shard)
                else:
                    update.await_update(shard)
                assert torch.equal(ours.tensors[shard], theirs.tensors[shard]), (step, shard)
        assert same_states(states_of(update), states_of(plain))
    assert not ours.held
    update.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("parts", [1, 3])
def test_every_optimizer_and_accumulation(optimizer: str, parts: int) -> None:
    groups = groups_of(optimizer)
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16, groups=groups, optimizer=optimizer)
    plain = OffloadedUpdate(plans(torch.bfloat16), optimizer, lambda: groups, theirs, device="cpu")
    for step in range(12):
        for one in (update, plain):
            backward(one, step, parts=parts if step < 8 else parts + 1)  # the experience of a step may be wrong
            if one is update:
                computed(update)
            one.step(grad_scale=0.7 if step == 4 else 1.0)
            one.clear_gradients()
        update.finish()
        assert torch.equal(ours.flat(), theirs.flat()), step
    assert same_states(states_of(update), states_of(plain))
    assert update.rate.committed >= 2 * 8
    update.close()
    plain.close()


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_states_in_two_blocks_of_memory(ratio: float) -> None:
    options = TierOptions(sub_group_size=4096, ratio=ratio)
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16, options)
    with update_of(theirs, plans(torch.bfloat16), options) as plain:
        for step in range(6):
            for one in (update, plain):
                backward(one, step)
                if one is update:
                    computed(update)
                one.step()
                one.clear_gradients()
        assert same_states(states_of(update), states_of(plain))
        assert torch.equal(ours.flat(), theirs.flat())
    assert update.rate.committed == 2 * 5
    update.close()


def test_what_changes_after_the_gradient_is_computed_again() -> None:
    groups = [dict(group) for group in GROUPS]
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16, groups=groups)
    plain = OffloadedUpdate(plans(torch.bfloat16), "AdamW", lambda: groups, theirs, device="cpu")
    changes: list[Callable[[OffloadedUpdate, Lender], None]] = [
        lambda one, lender: None,
        lambda one, lender: groups[0].update(lr=5e-3),
        lambda one, lender: groups[1].update(lr=torch.tensor(2e-3)),
        lambda one, lender: halve(one),
        lambda one, lender: written(one, lender),
        lambda one, lender: one.restart(["norm"]),
        lambda one, lender: one.write({"head": {"exp_avg": torch.ones(13_000)}}),
    ]
    for step, change in enumerate(changes):
        before = [dict(group) for group in groups]
        for one, lender in ((update, ours), (plain, theirs)):
            for group, old in zip(groups, before, strict=True):
                group.update(old)
            backward(one, step)
            if one is update:
                computed(update)
            change(one, lender)
            one.step()
            one.clear_gradients()
        assert same_states(states_of(update), states_of(plain)), step
        assert torch.equal(ours.flat(), theirs.flat()), step
    update.close()
    plain.close()


def halve(update: OffloadedUpdate) -> None:
    with update.gradient("first", dirty=True) as tensor:
        tensor.mul_(0.5)


def written(update: OffloadedUpdate, lender: Lender) -> None:
    lender.tensors["second"].fill_(2.0)
    update.weights_changed("second")


def test_states_are_the_old_ones_until_the_step_and_none_are_lost_without_one() -> None:
    lender = Lender(torch.bfloat16)
    update = exact_of(lender, torch.bfloat16)
    backward(update, 0)
    update.step()
    update.clear_gradients()
    before, weights = states_of(update), lender.flat()
    backward(update, 1)
    computed(update)
    assert same_states(states_of(update), before)
    assert torch.equal(lender.flat(), weights)
    update.clear_gradients()
    assert same_states(states_of(update), before)
    assert torch.equal(lender.flat(), weights)
    assert update.rate.replays == 1
    update.close()


def test_speculation_stops_where_it_does_not_pay_and_begins_again() -> None:
    lender = Lender(torch.bfloat16)
    update = exact_of(lender, torch.bfloat16)
    on = []
    for step in range(30):
        backward(update, step)
        computed(update)
        update.step(grad_scale=0.5 if step < 10 else 1.0)
        update.clear_gradients()
        on.append(update.rate.is_on)
    assert on[0] and not on[5] and not on[15] and on[-1]
    assert sum(a != b for a, b in pairwise(on)) == 2
    assert update.rate.committed > 0
    update.close()


def test_a_speculation_that_fails_changes_nothing() -> None:
    groups = [dict(group) for group in GROUPS]
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16, groups=groups)
    with update_of(theirs, plans(torch.bfloat16)) as plain:
        for step in range(3):
            if step == 2:
                groups[0]["betas"] = (2.0, 0.9)  # which no kernel takes
            for one in (update, plain):
                backward(one, step)
            computed(update)
            groups[0]["betas"] = GROUPS[0]["betas"]
            if step == 2:
                with pytest.warns(UserWarning, match="the update beside backward failed"):
                    update.step()
            else:
                update.step()
            plain.step()
            for one in (update, plain):
                one.clear_gradients()
        assert same_states(states_of(update), states_of(plain))
        assert torch.equal(ours.flat(), theirs.flat())
    update.close()


def test_a_late_update_that_fails_is_told_with_step_and_shard_until_the_states_are_reset() -> None:
    groups = [dict(group) for group in GROUPS]
    lender = Lender(torch.bfloat16)
    update = exact_of(lender, torch.bfloat16, groups=groups)
    backward(update, 0)
    update.step()
    update.clear_gradients()
    update.finish()
    update.rate.is_on = False
    groups[0]["betas"] = (2.0, 0.9)
    backward(update, 1)
    update.step()  # which returns: the arithmetic follows
    update.clear_gradients()
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"step 2: the update of '(first|second)' failed beside forward"):
            update.await_update("first")
        with pytest.raises(OffloadError, match="step 2"):
            update.step()
        with pytest.raises(OffloadError, match="step 2"):
            dict(update.states())
    groups[0]["betas"] = GROUPS[0]["betas"]
    update.reset()
    assert not dict(update.states())
    backward(update, 2)
    update.step()
    update.clear_gradients()
    assert set(states_of(update)) == {plan.name for own in FRAGMENTS.values() for plan in own}
    assert not lender.held
    update.close()


def test_late_updates_come_in_the_order_in_which_they_were_asked_for() -> None:
    lender = Lender(torch.bfloat16)
    update = exact_of(lender, torch.bfloat16)
    for step in range(3):
        backward(update, step)
        lender.log.clear()
        update.step()
        update.clear_gradients()
        assert list(update._updates._running) == (["first", "second"] if step == 0 else ["second", "first"])
        for shard in ("second", "first"):
            update.await_update(shard)
            assert not update.is_updating(shard)
        assert lender.log[2:] == ["give back second", "give back first"]
    update.close()


@pytest.mark.parametrize(("limit", "shards"), [(None, 2), (0, 0), (13_056 * 2 + 13_001 * 12, 1), (100_000, 0)])
def test_the_journal_is_bounded_and_holds_what_backward_completes_first(limit: int | None, shards: int) -> None:
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16, journal_nbytes=limit)
    assert [shard for shard in NUMELS if shard in update._journal] == list(NUMELS)[2 - shards :]
    assert update.memory() == update.plan
    with update_of(theirs, plans(torch.bfloat16)) as plain:
        assert limit is None or update.plan["staging"] <= limit
        for step in range(4):
            for one in (update, plain):
                backward(one, step)
                if one is update:
                    computed(update)
                one.step()
                one.clear_gradients()
        assert same_states(states_of(update), states_of(plain))
        assert torch.equal(ours.flat(), theirs.flat())
    assert update.rate.committed == 3 * shards
    update.close()


def test_its_thread_ends_with_it(tmp_path: Any) -> None:
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("zero-offload exact update")]

    update = exact_of(Lender(torch.bfloat16), torch.bfloat16)
    backward(update, 0)
    update.step()
    assert threads()
    update.close()
    update.close()
    assert not threads()
    with pytest.raises(ValueError, match="tier: expected 'host'"):
        exact_of(Lender(torch.bfloat16), torch.bfloat16, TierOptions(tier="nvme", path=tmp_path))


def test_closing_finishes_the_updates_that_a_step_has_left_running() -> None:
    ours, theirs = Lender(torch.bfloat16), Lender(torch.bfloat16)
    update = exact_of(ours, torch.bfloat16)
    plain = OffloadedUpdate(plans(torch.bfloat16), "AdamW", lambda: GROUPS, theirs, device="cpu")
    for one in (update, plain):
        backward(one, 0)
        one.step()
        one.close()
    assert torch.equal(ours.flat(), theirs.flat())
    with pytest.raises(OffloadError, match="closed"):
        update.step()
