from __future__ import annotations

import json
from typing import Any

import pytest
import schedule_cases as cases
import torch
from schedule_frozen import AT, FROZEN

from zero_optim import schedules
from zero_optim.schedules import (
    LRRangeTest,
    NotSteppedError,
    OneCycle,
    Scheduler,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)


def _made(case: cases.Case, optimizer: Any) -> Any:
    name, arguments = case
    return getattr(schedules, name)(optimizer, **arguments)


def _rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def _id(case: cases.Case) -> str:
    return case[0]


every_kind = pytest.mark.parametrize("case", [*cases.CHOSEN, *cases.drawn(3, seed=8)], ids=_id)


@pytest.mark.parametrize(("name", "arguments", "rates", "momenta"), FROZEN)
def test_rates_and_momenta_follow_the_formulas(
    name: str, arguments: dict[str, Any], rates: tuple[float, ...], momenta: tuple[float, ...] | None
) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    schedule = getattr(schedules, name)(optimizer, **arguments)
    for iteration in range(-1, max(AT) + 1):
        if iteration >= 0:
            schedule.step()
        if iteration in AT:
            index = AT.index(iteration)
            assert _rates(optimizer) == pytest.approx([rates[index]], rel=1e-13, abs=0)
            if momenta is not None:
                assert optimizer.param_groups[0]["betas"] == pytest.approx((momenta[index], 0.99), rel=1e-13)


@every_kind
def test_the_rates_reported_are_those_written(case: cases.Case) -> None:
    optimizer = cases.optimizer()
    schedule = _made(case, optimizer)
    assert isinstance(schedule, Scheduler)
    for _ in range(50):
        schedule.step()
        assert schedule.get_last_lr() == schedule.get_lr() == _rates(optimizer)


@every_kind
@pytest.mark.parametrize("stopped", [0, 1, 13, 120])
def test_a_resumed_schedule_goes_on_bitwise(case: cases.Case, stopped: int) -> None:
    optimizer, resumed_optimizer = cases.optimizer(), cases.optimizer()
    schedule, resumed = _made(case, optimizer), _made(case, resumed_optimizer)
    for _ in range(stopped):
        schedule.step()
    state = schedule.state_dict()
    assert state == {"last_batch_iteration": stopped - 1}
    resumed.load_state_dict(json.loads(json.dumps(state)))
    for _ in range(50):
        schedule.step()
        resumed.step()
        assert _rates(optimizer) == _rates(resumed_optimizer)
        assert [g["betas"] for g in optimizer.param_groups] == [g["betas"] for g in resumed_optimizer.param_groups]


@every_kind
def test_the_parameters_of_a_group_may_be_replaced(case: cases.Case) -> None:
    untouched, replaced = cases.optimizer(), cases.optimizer()
    first, second = _made(case, untouched), _made(case, replaced)
    for group in replaced.param_groups:
        group["params"] = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(0))]
    for _ in range(20):
        first.step()
        second.step()
        assert _rates(untouched) == _rates(replaced)


@every_kind
def test_rates_held_as_tensors_are_written_in_place(case: cases.Case) -> None:
    optimizer = cases.optimizer(tensor_rates=True)
    held = _rates(optimizer)
    schedule, plain = _made(case, optimizer), _made(case, cases.optimizer())
    for _ in range(20):
        schedule.step()
        plain.step()
        assert all(now is before for now, before in zip(_rates(optimizer), held, strict=True))
        assert [float(rate) for rate in _rates(optimizer)] == pytest.approx(plain.get_last_lr(), rel=1e-5, abs=1e-12)


@every_kind
def test_going_to_an_iteration_is_the_same_as_stepping_there(case: cases.Case) -> None:
    optimizer, jumped_optimizer = cases.optimizer(), cases.optimizer()
    schedule, jumped = _made(case, optimizer), _made(case, jumped_optimizer)
    for _ in range(31):
        schedule.step()
    jumped.step(30)
    assert _rates(optimizer) == _rates(jumped_optimizer)


def test_rates_at_construction() -> None:
    optimizer = cases.optimizer()
    assert WarmupLR(optimizer, warmup_min_lr=[1e-4, 2e-4]).get_last_lr() == [1e-4, 2e-4] == _rates(optimizer)
    optimizer = cases.optimizer()
    assert WarmupCosineLR(optimizer, 100).get_last_lr() == [0.0, 0.0] == _rates(optimizer)
    optimizer = cases.optimizer()
    assert LRRangeTest(optimizer, 1e-3).get_last_lr() == [1e-3, 1e-3] == _rates(optimizer)
    optimizer = cases.optimizer()
    OneCycle(optimizer, 1e-3, 1e-2)
    assert _rates(optimizer) == [1e-3, 1e-3]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.99)] * 2


def test_a_rate_asked_for_before_one_was_set_is_an_error_that_callers_of_deepspeed_catch() -> None:
    schedules_without_rates = [
        OneCycle(cases.optimizer(), 1e-3, 1e-2),
        WarmupLR(cases.optimizer(), last_batch_iteration=3),
    ]
    for schedule in schedules_without_rates:
        with pytest.raises(AssertionError, match="need to call step\\(\\) first") as caught:
            schedule.get_last_lr()
        assert isinstance(caught.value, NotSteppedError) and isinstance(caught.value, ValueError)
        schedule.step()
        assert len(schedule.get_last_lr()) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=0), "warmup_num_steps: expected an integer >= 1, got 0"),
        (lambda o: WarmupLR(o, warmup_num_steps=1.5), "warmup_num_steps: expected an integer >= 1, got 1.5"),
        (lambda o: WarmupLR(o, warmup_max_lr="auto"), "warmup_max_lr: expected a number or a list of numbers"),
        (lambda o: WarmupLR(o, [0.1] * 3), "warmup_min_lr: expected one number, or one for each of the 2 param groups"),
        (lambda o: WarmupLR(o, last_batch_iteration=-2), "last_batch_iteration: expected an integer >= -1"),
        (lambda o: WarmupDecayLR(o, None), "total_num_steps: expected an integer >= 1, got None"),
        (lambda o: WarmupCosineLR(o, 0), "total_num_steps: expected an integer >= 1, got 0"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "lr_range_test_step_size: expected an integer >= 1"),
        (lambda o: OneCycle(o, 1e-3, None), "cycle_max_lr: expected a number or a list of numbers, got None"),
        (
            lambda o: OneCycle(o, 0, 1, cycle_first_step_size=0),
            "cycle_first_step_size: expected a number of iterations > 0",
        ),
        (
            lambda o: OneCycle(o, 0, 1, cycle_second_step_size=-1),
            "cycle_second_step_size: expected a number of iterations",
        ),
        (lambda o: OneCycle(o, 0, 1, cycle_first_stair_count=-1), "cycle_first_stair_count: expected an integer >= 0"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(make: Any, message: str) -> None:
    optimizer = cases.optimizer()
    with pytest.raises(ValueError) as caught:
        make(optimizer)
    assert message in str(caught.value)
    assert _rates(optimizer) == list(cases.RATES)


def test_the_state_of_another_kind_of_schedule_is_refused() -> None:
    schedule = WarmupLR(cases.optimizer())
    with pytest.raises(ValueError, match="expected an integer 'last_batch_iteration', got None .the state holds"):
        schedule.load_state_dict({"last_epoch": 3, "base_lrs": [0.1]})


def test_a_param_group_added_later_is_an_error_by_name() -> None:
    optimizer = cases.optimizer()
    schedule = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="built for 2 param groups, the optimizer now has 3"):
        schedule.step()


def test_momentum_that_cannot_be_cycled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = cases.optimizer(torch.optim.SGD)
    schedule = OneCycle(optimizer, 1e-3, 1e-2)
    assert "no param group of SGD has betas" in caplog.text
    schedule.step()
    assert all("betas" not in group for group in optimizer.param_groups)


def test_a_warm_up_longer_than_training_is_said(caplog: pytest.LogCaptureFixture) -> None:
    WarmupDecayLR(cases.optimizer(), total_num_steps=10, warmup_num_steps=20)
    assert "total_num_steps 10 is less than warmup_num_steps 20" in caplog.text


def test_public_names_are_exact() -> None:
    assert schedules.__all__ == sorted(schedules.__all__)
    public = {name for name in vars(schedules) if not name.startswith("_")}
    modules = {"annotations", "base", "build", "cyclic", "state", "warmup"}
    assert public - modules == set(schedules.__all__)
