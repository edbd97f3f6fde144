from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import scheduler_cases as cases
import torch
from torch.optim import lr_scheduler

from zero_core.checkpoint.scheduler_state import load_plain_state, plain_state
from zero_core.errors import UsageError
from zero_optim import WarmupLR

Make = Callable[[torch.optim.Optimizer], Any]


def _sequence(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [4, 4, 9])]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


KINDS: dict[str, Make] = {
    "WarmupLR": WarmupLR,
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [4, 8, 8, 30]),
    "MultiStepLR without milestones": lambda o: lr_scheduler.MultiStepLR(o, []),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=60),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=5, cycle_momentum=False),
    "SequentialLR": _sequence,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], optimizer=o
    ),
}


def _advance(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor_rates", [False, True])
def test_a_schedule_resumed_from_plain_data_goes_on_bitwise(kind: str, tensor_rates: bool) -> None:
    before = cases.optimizer(tensor_rates=tensor_rates)
    schedule = KINDS[kind](before)
    _advance(before, schedule, 7)
    after = cases.optimizer(tensor_rates=tensor_rates)
    resumed = KINDS[kind](after)
    load_plain_state(resumed, json.loads(json.dumps(plain_state(schedule))))
    for group, stored in zip(after.param_groups, before.param_groups, strict=True):
        group.update({key: value for key, value in stored.items() if key not in ("params", "lr")})
        if tensor_rates:
            group["lr"].copy_(stored["lr"])
        else:
            group["lr"] = stored["lr"]
    for _ in range(30):
        _advance(before, schedule, 1)
        _advance(after, resumed, 1)
        assert [float(g["lr"]) for g in after.param_groups] == [float(g["lr"]) for g in before.param_groups]
        assert [float(x) for x in resumed.get_last_lr()] == [float(x) for x in schedule.get_last_lr()]


def test_what_only_pickle_could_hold_is_refused_by_name() -> None:
    class Odd(WarmupLR):
        def state_dict(self) -> dict[str, Any]:
            return {"phases": [1, {"rates": {0.1, 0.2}}]}

    with pytest.raises(UsageError) as caught:
        plain_state(Odd(cases.optimizer()))
    assert "the state of Odd['phases'][1]['rates'] is a set" in str(caught.value)
