from __future__ import annotations

from typing import Any

import pytest
import scheduler_cases as cases
import torch
from torch.optim import lr_scheduler

import zero_optim
from zero_core.errors import UsageError
from zero_core.schedules import build_scheduler
from zero_optim import WarmupDecayLR, WarmupLR
from zero_optim.schedules import VALID_LR_SCHEDULES
from zero_settings import Config


def _config(scheduler: dict[str, Any] | None = None) -> Config:
    section = {} if scheduler is None else {"scheduler": scheduler}
    return Config.load({"train_micro_batch_size_per_gpu": 1, **section}, world_size=1)


def test_nothing_asked_for_is_nothing() -> None:
    assert build_scheduler(None, _config(), cases.optimizer()) is None
    assert build_scheduler(None, _config(), None) is None


@pytest.mark.parametrize("case", cases.CHOSEN, ids=lambda case: case[0])
def test_what_the_configuration_names_is_the_class_with_those_arguments(case: cases.Case) -> None:
    name, arguments = case
    named, direct = cases.optimizer(), cases.optimizer()
    built = build_scheduler(None, _config({"type": name, "params": arguments}), named)
    expected = getattr(zero_optim, name)(direct, **arguments)
    assert type(built).__name__ == name
    for _ in range(30):
        built.step()
        expected.step()
        assert built.get_last_lr() == expected.get_last_lr()


def test_every_name_is_known_to_the_configuration() -> None:
    from zero_settings._optim_keys import SCHEDULES

    assert sorted(VALID_LR_SCHEDULES) == sorted(SCHEDULES)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("StepLR", {"step_size": 3, "gamma": 0.5}),
        ("CosineAnnealingLR", {"T_max": 20, "eta_min": 1e-4}),
        ("OneCycleLR", {"max_lr": [0.1, 0.2], "total_steps": 40}),
        ("MultiStepLR", {"milestones": [5, 10], "gamma": 0.1}),
    ],
)
def test_torch_schedules_are_built_by_name(name: str, params: dict[str, Any]) -> None:
    named, direct = cases.optimizer(), cases.optimizer()
    built = build_scheduler(None, _config({"type": name, "params": params}), named)
    expected = getattr(lr_scheduler, name)(direct, **params)
    for _ in range(20):
        for optimizer, schedule in ((named, built), (direct, expected)):
            optimizer.step()
            schedule.step()
        assert built.get_last_lr() == expected.get_last_lr()


def test_an_object_is_taken_as_it_is_and_wins_over_the_configuration() -> None:
    optimizer = cases.optimizer()
    given = lr_scheduler.StepLR(optimizer, 3)
    assert build_scheduler(given, _config({"type": "WarmupLR", "params": {}}), optimizer) is given


def test_a_function_or_a_class_is_called_with_the_optimizer() -> None:
    optimizer = cases.optimizer()
    made = build_scheduler(lambda o: WarmupDecayLR(o, 100), _config(), optimizer)
    assert isinstance(made, WarmupDecayLR) and made.optimizer is optimizer
    assert isinstance(build_scheduler(WarmupLR, _config(), optimizer), WarmupLR)


def test_a_schedule_on_a_wrapper_of_the_optimizer_is_accepted() -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            return self.optimizer.param_groups

    optimizer = cases.optimizer()
    given = WarmupLR(Wrapper(optimizer))
    assert build_scheduler(given, _config(), optimizer) is given


@pytest.mark.parametrize(
    ("given", "section", "message"),
    [
        (WarmupLR, None, "lr_scheduler was given, but there is no optimizer for it to drive"),
        (
            None,
            {"type": "WarmupLR", "params": {}},
            "the configuration has a `scheduler` section, but there is no optimizer",
        ),
    ],
)
def test_a_schedule_without_an_optimizer_is_refused(given: Any, section: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_scheduler(given, _config(section), None)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "lr_scheduler: expected a schedule or a function of the optimizer, got int"),
        (lambda o: None, "what the function returned is no schedule: NoneType has no step, get_last_lr"),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), "ReduceLROnPlateau.step() needs an argument"),
        (
            lambda o: WarmupLR(cases.optimizer()),
            "WarmupLR drives other param groups than those of the engine's optimizer",
        ),
    ],
)
def test_what_cannot_be_stepped_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_scheduler(given, _config(), cases.optimizer())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "OneCycleLR", "params": {"max_lr": 0.1}}, "OneCycleLR refused"),
        ({"type": "LambdaLR", "params": {"lr_lambda": "x"}}, "LambdaLR refused"),
        ({"type": "ReduceLROnPlateau", "params": {}}, "scheduler.type 'ReduceLROnPlateau'"),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1]}},
            "warmup_max_lr: expected one number, or one for each",
        ),
    ],
)
def test_arguments_that_the_class_refuses_are_an_error_by_name(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_scheduler(None, _config(section), cases.optimizer())
    assert message in str(caught.value)


def test_total_num_steps_left_to_a_framework_is_asked_for_by_name() -> None:
    config = _config({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})
    with pytest.raises(UsageError, match="total_num_steps: expected an integer >= 1, got None"):
        build_scheduler(None, config, cases.optimizer())
