"""Step hooks and schedules of the user's that raise: training continues as plain torch's, and nothing is half
written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import LR, Run

import zero_core
from zero_comm import run_ranks

SOAK = pytest.mark.soak
PLACES = [(0, "device"), *((stage, tier) for stage in (1, 2, 3) for tier in ("device", "cpu", "nvme"))]
WHERE = ("before", "after", "schedule", "before all", "after all")
REGISTER = {"before all": register_optimizer_step_pre_hook, "after all": register_optimizer_step_post_hook}


def fail(*_: Any) -> None:
    raise ArithmeticError("no luck")


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    """Halves the learning rate with each step, and fails when it is told to."""

    fails = False

    def get_lr(self) -> list[float]:
        if self.fails:
            fail()
        return [LR * 0.5 ** max(self.last_epoch, 0) for _ in self.base_lrs]


def plain(where: str, failing: int, steps: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    model = zoo.build("plain", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    schedule = Schedule(optimizer) if where == "schedule" else None
    for step in range(steps):
        sum(model(*zoo.batch(step, 0))).backward()
        handle = register(optimizer, where) if step == failing else None
        try:
            optimizer.step()
            if schedule is not None:
                schedule.fails = step == failing
                schedule.step()
        except ArithmeticError:
            if schedule is not None:
                schedule.last_epoch -= 1
        if handle is not None:
            handle.remove()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def register(optimizer: Any, where: str) -> Any:
    if where == "schedule":
        return None
    if where in REGISTER:
        return REGISTER[where](fail)
    register_hook = optimizer.register_step_pre_hook if where == "before" else optimizer.register_step_post_hook
    return register_hook(fail)


def goes_on(where: str, alone: bool, stage: int, zero: dict[str, Any], dtype: str = "fp64") -> dict[str, Any]:
    """Five steps, of which the third fails on all ranks or on the last one; before its weights are saved or read."""
    model = zoo.build("plain", training.DTYPES["fp64" if dtype == "fp64" else "fp32"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    settings = training.config(Run(dtype=dtype), stage, dist.get_world_size(), **zero)
    schedule = Schedule(optimizer) if where == "schedule" else None
    engine = zero_core.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)[0]
    here = not alone or dist.get_rank() == dist.get_world_size() - 1
    said = "no error"
    for step in range(5):
        handle = register(engine.optimizer, where) if step == 2 and here else None
        if schedule is not None:
            schedule.fails = step == 2
        try:
            training.train(engine, Run(), step, step + 1)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if schedule is not None:
                schedule.last_epoch -= 1
        if handle is not None:
            handle.remove()
        if step == 2:
            if where.startswith("before"):
                training.weights(engine)
            engine.zero_grad()
    found = {"said": said, "weights": training.weights(engine), "steps": engine.global_steps}
    engine.destroy(unshard=False)
    return found


def all_cases(cases: list[tuple[str, bool, int, str]], folder: str) -> list[dict[str, Any]]:
    return [goes_on(where, alone, stage, training.offload(stage, tier, folder)) for where, alone, stage, tier in cases]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, [("before", False, 3, "cpu"), ("after", False, 2, "device")]),
        (2, [("before", True, 3, "nvme"), ("after", False, 1, "cpu"), ("before", False, 0, "device")]),
        (2, [("before all", True, 1, "device"), ("after all", False, 3, "cpu"), ("before all", False, 2, "nvme")]),
        (3, [("before", True, 2, "device"), ("schedule", False, 3, "device"), ("after", True, 3, "cpu")]),
        *(
            pytest.param(n, [(w, a, *p) for w in WHERE for a in (False, True)], marks=SOAK)
            for n in (1, 2, 3)
            for p in PLACES
        ),
    ],
)
def test_training_goes_on_after_a_hook_or_a_schedule_that_raises(
    world_size: int, cases: list[tuple[str, bool, int, str]], tmp_path: Any
) -> None:
    cases = [case for case in cases if not (case[0] == "schedule" and case[1])]  # then learning rates differ
    for rank, found in enumerate(run_ranks(all_cases, world_size, cases, str(tmp_path))):
        for (where, alone, stage, tier), facts in zip(cases, found, strict=True):
            case = (rank, where, alone, stage, tier)
            expected = plain(where, 2, 5)
            assert training.deviation(facts["weights"], expected) <= 1e-12, case
            assert facts["steps"] == (4 if where.startswith("before") else 5), case
            if not alone or rank == world_size - 1:
                assert facts["said"].startswith("ArithmeticError: no luck"), (case, facts["said"])


def growing(stage: int, scale: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = zoo.build("plain", torch.float32)
    settings = training.config(Run(dtype="fp16"), stage, dist.get_world_size())
    settings["fp16"] = {"enabled": True, **scale}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
    training.train(engine, Run(), 0, 4)
    found = training.weights(engine)
    engine.destroy(unshard=False)
    return found


def growing_and_not(stages: tuple[int, ...]) -> list[bool]:
    dynamic = {"initial_scale_power": 10, "loss_scale_window": 1}
    return [
        training.bits(growing(stage, dynamic)) == training.bits(growing(stage, {"loss_scale": 1024.0}))
        for stage in stages
    ]


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=SOAK)])
def test_a_loss_scale_that_grows_leaves_the_steps_gradients_as_they_are(stages: tuple[int, ...]) -> None:
    assert all(all(found) for found in run_ranks(growing_and_not, 2, stages))


def calls_of_a_hook_of_all_optimizers(stages: tuple[int, ...]) -> list[list[bool]]:
    found = []
    for stage in stages:
        calls: list[Any] = []
        handle = register_optimizer_step_pre_hook(lambda one, *_, calls=calls: calls.append(one))
        model = zoo.build("plain", torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        settings = training.config(Run(dtype="fp64"), stage, dist.get_world_size())
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
        training.train(engine, Run(), 0, 3)
        handle.remove()
        found.append([one is engine.optimizer for one in calls])
        engine.destroy(unshard=False)
    return found


def test_a_hook_of_all_optimizers_sees_each_step_once_and_nothing_else() -> None:
    for found in run_ranks(calls_of_a_hook_of_all_optimizers, 2, (0, 3)):
        assert found == [[True] * 3, [True] * 3]
