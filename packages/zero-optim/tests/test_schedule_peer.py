"""The values of DeepSpeed's schedules, step by step and to the last bit."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import pytest
import schedule_cases as cases
import torch
from schedule_frozen import AT, FROZEN

from zero_optim import schedules

pytestmark = pytest.mark.peer

STEPS = 2000


@pytest.fixture(scope="module")
def peer() -> Any:
    """DeepSpeed's schedules, on a machine that need not have an accelerator."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    reason = "deepspeed is not installed: nothing to compare with"
    return pytest.importorskip("deepspeed.runtime.lr_schedules", reason=reason)


class Pair:
    """The same schedule of both, each on an optimizer of its own."""

    def __init__(self, peer: Any, name: str, arguments: dict[str, Any], *, tensor_rates: bool = False, **more: Any):
        self.optimizers = [cases.optimizer(tensor_rates=tensor_rates) for _ in range(2)]
        self.schedules = [
            getattr(module, name)(optimizer, **copy.deepcopy(arguments), **more)
            for module, optimizer in zip((schedules, peer), self.optimizers, strict=True)
        ]

    def step(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def check(self, *, rates: bool = True) -> None:
        """Both optimizers hold the same hyperparameters, and both schedules say the same."""
        ours, theirs = ([_without_params(group) for group in each.param_groups] for each in self.optimizers)
        assert ours == theirs
        if rates:
            assert self.schedules[0].get_last_lr() == self.schedules[1].get_last_lr()
            assert self.schedules[0].get_lr() == self.schedules[1].get_lr()
        assert self.schedules[0].state_dict() == self.schedules[1].state_dict()


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _id(case: cases.Case) -> str:
    return case[0]


@pytest.mark.parametrize("case", [*cases.CHOSEN, *cases.drawn(12, seed=5)], ids=_id)
def test_every_step_gives_the_rates_and_momenta_of_deepspeed(peer: Any, case: cases.Case) -> None:
    pair = Pair(peer, *case)
    pair.check(rates=case[0] != "OneCycle")
    for _ in range(STEPS):
        pair.step()
        pair.check()


@pytest.mark.parametrize("case", [*cases.CHOSEN, *cases.drawn(4, seed=6)], ids=_id)
@pytest.mark.parametrize("stopped", [0, 1, 37, 1000])
def test_resumed_schedules_go_on_as_deepspeed_does(peer: Any, case: cases.Case, stopped: int) -> None:
    before = Pair(peer, *case)
    for _ in range(stopped):
        before.step()
    after = Pair(peer, *case)
    for saved, fresh in zip(before.schedules, after.schedules, strict=True):
        fresh.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    after.check(rates=False)
    for _ in range(200):
        before.step()
        after.step()
        after.check()
        assert after.schedules[0].get_last_lr() == before.schedules[0].get_last_lr()


@pytest.mark.parametrize("case", cases.CHOSEN, ids=_id)
def test_a_later_start_writes_nothing_before_the_first_step(peer: Any, case: cases.Case) -> None:
    pair = Pair(peer, *case, last_batch_iteration=41)
    assert [group["lr"] for group in pair.optimizers[0].param_groups] == list(cases.RATES)
    for schedule in pair.schedules:
        with pytest.raises(AssertionError, match="need to call step"):
            schedule.get_last_lr()
    for _ in range(100):
        pair.step()
        pair.check()


@pytest.mark.parametrize("case", cases.CHOSEN, ids=_id)
def test_rates_held_as_tensors_get_the_same_float32_values(peer: Any, case: cases.Case) -> None:
    pair = Pair(peer, *case, tensor_rates=True)
    held = [group["lr"] for group in pair.optimizers[0].param_groups]
    for _ in range(500):
        pair.step()
        for ours, theirs in zip(*(each.param_groups for each in pair.optimizers), strict=True):
            assert torch.equal(ours["lr"], theirs["lr"])
    assert all(group["lr"] is tensor for group, tensor in zip(pair.optimizers[0].param_groups, held, strict=True))


@pytest.mark.parametrize("case", cases.CHOSEN, ids=_id)
def test_an_optimizer_without_betas_gets_the_same_rates(peer: Any, case: cases.Case) -> None:
    name, arguments = case
    ours, theirs = (cases.optimizer(torch.optim.SGD) for _ in range(2))
    pair = [getattr(schedules, name)(ours, **arguments), getattr(peer, name)(theirs, **arguments)]
    for _ in range(500):
        for schedule in pair:
            schedule.step()
        assert [_without_params(g) for g in ours.param_groups] == [_without_params(g) for g in theirs.param_groups]


@pytest.mark.parametrize(("name", "arguments", "rates", "momenta"), FROZEN)
def test_the_frozen_values_are_those_of_deepspeed(
    peer: Any, name: str, arguments: dict[str, Any], rates: tuple[float, ...], momenta: tuple[float, ...] | None
) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    schedule = getattr(peer, name)(optimizer, **arguments)
    for iteration in range(-1, max(AT) + 1):
        if iteration >= 0:
            schedule.step()
        if iteration in AT:
            index = AT.index(iteration)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[index], rel=1e-13, abs=0)
            if momenta is not None:
                assert optimizer.param_groups[0]["betas"][0] == pytest.approx(momenta[index], rel=1e-13)


def test_names_and_defaults_are_those_of_deepspeed(peer: Any) -> None:
    import inspect

    assert schedules.VALID_LR_SCHEDULES == peer.VALID_LR_SCHEDULES
    for name in schedules.VALID_LR_SCHEDULES:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (schedules, peer))
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]
