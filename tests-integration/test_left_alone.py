"""A rank that fails while its process lives, leaves, or stands still frees the ranks that wait, with the cause."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run

from zero_comm import run_ranks

PHASES = ("forward", "backward", "loss.backward", "step", "save", "load", "gathered", "gathered, modified")
STAGES = (0, 1, 2, 3)
SLEEP = 60.0
BOUND = 5.0  # seconds, and what the machine is behind by


def fail(*_: Any, **__: Any) -> None:
    raise ArithmeticError("no luck")


def in_phase(engine: Any, phase: str, folder: str, failing: bool) -> None:
    """One call of ``phase``; on the failing rank it fails in the middle."""
    inputs = zoo.batch(2, 0, dist.get_rank(), dist.get_world_size())
    block = engine.module.blocks[1]
    if phase == "forward":
        handle = block.register_forward_pre_hook(fail) if failing else None
        losses = engine(*inputs)
        assert handle is None
        engine.backward(losses[0])
    elif phase == "backward":
        if failing:
            block.register_forward_hook(lambda _m, _a, output: output.register_hook(fail) and None)
        engine.backward(engine(*inputs)[0])
    elif phase == "loss.backward":
        if failing:
            block.down.weight.register_hook(fail)
        engine(*inputs)[0].backward()
        engine.step()
    elif phase == "step":
        engine.backward(engine(*inputs)[0])
        if failing:
            engine.optimizer.register_step_pre_hook(fail)
        engine.step()
    elif phase == "save":
        engine.lr_scheduler = Schedule(failing)
        engine.save_checkpoint(folder, "failing")
    elif phase == "load":
        engine.load_checkpoint(folder, custom_load_fn=fail if failing else lambda src, dst: None)
    else:
        with engine.gathered(engine.module.parameters(), modifier_rank=0 if "modified" in phase else None):
            if failing:
                fail()
    training.train(engine, Run(), 3, 4)


class Schedule:
    def __init__(self, failing: bool) -> None:
        self.failing = failing

    def state_dict(self) -> dict[str, Any]:
        if self.failing:
            fail()
        return {}

    def step(self) -> None:
        """A rate that stays."""


class Broken(torch.autograd.Function):
    """A loss whose backward fails before autograd comes to the model's output."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no luck")


HANDLED = ("as it is", "raised again", "by a debugger")


def cleans_up(stage: int, how: str) -> tuple[str, float]:
    """The last rank's ``loss.backward()`` fails before the engine has a part in it, and it stays in its handler: that
    of the failure, that of what was raised from it, or a debugger that opens when a script has ended."""
    engine = training.start(Run(), stage)
    training.train(engine, Run(), 0, 2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    loss = sum(engine(*zoo.batch(2, 0, rank, world_size)))
    if rank < world_size - 1:
        message = outcome(lambda: (loss.backward(), engine.step()))
        freed = time.monotonic()
        store.wait(["failed"])
        store.add("freed", 1)
        return message, freed - float(store.get("failed"))
    message = "no error"
    try:
        try:
            Broken.apply(loss).backward()
        except ArithmeticError as error:
            message = f"{type(error).__name__}: {error}"
            if how == "raised again":
                raise RuntimeError("the script's own") from error
            if how == "by a debugger":
                sys.last_value = error  # as the interpreter does for an exception that nobody catches
            else:
                sleep(store)
    except RuntimeError:
        sleep(store)
    if how == "by a debugger":
        sleep(store)
        del sys.last_value
    return message, 0.0


@pytest.mark.parametrize(
    ("world_size", "stage", "how"),
    [
        (2, 1, "raised again"),
        *(pytest.param(n, s, how, marks=pytest.mark.soak) for n in (2, 3) for s in STAGES for how in HANDLED),
    ],
)
def test_a_loss_whose_own_backward_fails_frees_the_others(world_size: int, stage: int, how: str) -> None:
    *others, (cause, _) = run_ranks(cleans_up, world_size, stage, how, timeout=100)
    assert cause.startswith("ArithmeticError: no luck"), cause
    for message, held in others:
        assert message.startswith("PeerError") and "ArithmeticError: no luck" in message, message
        assert held <= BOUND, (stage, held)


def lives_on(stage: int, phase: str, folder: str, zero: dict[str, Any], inside: bool) -> tuple[str, float]:
    """The last rank fails and sleeps, ``inside`` its handler or after it; the others say how long they were held and by
    what they were freed."""
    engine = training.start(Run(), stage, **zero)
    training.train(engine, Run(), 0, 2)
    if phase == "load":
        engine.save_checkpoint(folder)
    failing = dist.get_rank() == dist.get_world_size() - 1
    store = dist.distributed_c10d._get_default_store()
    message = "no error"
    try:
        in_phase(engine, phase, folder, failing)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if failing and inside:
            sleep(store)
    if failing and not inside:
        sleep(store)
    if failing:
        return message, 0.0
    freed = time.monotonic()
    store.wait(["failed"])
    store.add("freed", 1)
    return message, freed - float(store.get("failed"))


def sleep(store: Any) -> None:
    """Do nothing for a minute, or until all other ranks are free."""
    store.set("failed", str(time.monotonic()))
    asleep = time.monotonic() + SLEEP
    while time.monotonic() < asleep and store.add("freed", 0) < dist.get_world_size() - 1:
        time.sleep(0.1)


def outcome(scenario: Callable[[], Any]) -> str:
    try:
        scenario()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check(world_size: int, stage: int, phase: str, tier: str = "", *, inside: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as swap:
        where = {"device": tier} | ({"nvme_path": swap} if tier == "nvme" else {})
        zero = {"offload_optimizer": where} if tier else {}
        *others, (cause, _) = run_ranks(lives_on, world_size, stage, phase, folder, zero, inside, timeout=100)
    assert cause.startswith("ArithmeticError: no luck"), cause
    for message, held in others:
        named = f"rank {world_size - 1} failed: ArithmeticError: no luck"
        assert message.startswith("PeerError") and named in message, (phase, stage, message)
        assert held <= BOUND, (phase, stage, held)


@pytest.mark.parametrize(
    ("world_size", "stage", "phase", "inside"),
    [
        (2, 0, "forward", False),
        (2, 3, "forward", True),
        (3, 2, "backward", False),
        (2, 3, "loss.backward", False),
        (3, 1, "loss.backward", True),
        (2, 1, "step", True),
        (2, 3, "save", False),
        (2, 3, "load", True),
        (3, 3, "gathered, modified", False),
        *(pytest.param(n, s, p, True, marks=pytest.mark.soak) for n in (2, 3) for s in STAGES for p in PHASES),
    ],
)
def test_a_rank_that_fails_while_its_process_lives_frees_the_others(
    world_size: int, stage: int, phase: str, inside: bool
) -> None:
    check(world_size, stage, phase, inside=inside)


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("stage", "tier"), [(0, ""), *((stage, tier) for stage in (1, 2, 3) for tier in ("", "cpu", "nvme"))]
)
@pytest.mark.parametrize("world_size", (2, 3))
def test_every_phase_at_every_stage_frees_the_others(world_size: int, stage: int, tier: str, phase: str) -> None:
    check(world_size, stage, phase, tier)


class Records(logging.Handler):
    """Keeps what is logged, and counts it in ``store``."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._store = store

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._store.add("said", 1)


def silent(stage: int) -> tuple[list[str], float]:
    """The last rank's loss fails before autograd comes to the model; it forgets that and does nothing, until the others
    have said for whom they wait. Then the loss is right, and training continues."""
    engine = training.start(Run(), stage)
    training.train(engine, Run(), 0, 2)
    store = dist.distributed_c10d._get_default_store()
    records = Records(store)
    loss = sum(engine(*zoo.batch(2, 0, dist.get_rank(), dist.get_world_size())))
    if dist.get_rank() == dist.get_world_size() - 1:
        assert outcome(Broken.apply(loss).backward).startswith("ArithmeticError")
        while store.add("said", 0) < dist.get_world_size() - 1:
            time.sleep(0.1)
    else:
        logging.getLogger("zero_comm").addHandler(records)
    loss.backward()
    engine.step()
    logging.getLogger("zero_comm").removeHandler(records)
    training.train(engine, Run(), 3, 4)
    return records.texts, training.deviation(training.weights(engine), training.plain(Run(steps=4)))


@pytest.mark.parametrize(
    ("world_size", "stage"), [(2, 3), *(pytest.param(n, s, marks=pytest.mark.soak) for n in (2, 3) for s in STAGES)]
)
def test_a_rank_that_begins_no_backward_is_named_with_its_line_and_waited_for(world_size: int, stage: int) -> None:
    (texts, _), *_ = found = run_ranks(silent, world_size, stage, timeout=60)
    late = world_size - 1
    assert re.match(rf"rank 0 has waited \d+ s at backward '' in step 2.*, for rank {late}\. The ranks:\n", texts[0]), (
        texts
    )
    line = rf"\n  rank {late}: runs at test_left_alone\.py:\d+, and has begun no backward pass since its last forward; "
    assert re.search(line, texts[0]), texts
    assert all(deviation <= 1e-12 for _, deviation in found)


def apart(stage: int, accumulation: int, ends_with: str) -> str:
    """Rank 0 runs 8 micro-batches, the others 6."""
    engine = training.start(Run(accumulation=accumulation), stage)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def loop() -> None:
        for number in range(8 if rank == 0 else 6):
            engine.backward(engine(*zoo.batch(number, 0, rank, world_size))[0])
            engine.step()
        if ends_with == "barrier":
            dist.barrier()
        elif ends_with == "save":
            with tempfile.TemporaryDirectory() as folder:
                engine.save_checkpoint(folder)

    return outcome(loop)


@pytest.mark.parametrize(("world_size", "stage", "ends_with"), [(2, 1, "barrier"), (3, 3, "barrier"), (2, 0, "save")])
def test_different_numbers_of_micro_batches_are_named(world_size: int, stage: int, ends_with: str) -> None:
    first, *_ = run_ranks(apart, world_size, stage, 2, ends_with, timeout=60)
    assert "rank 0" in first and "rank 1" in first and "6 micro-batches" in first, first
    assert "backward '' in step 3" in first or stage == 3, first
    if ends_with == "barrier":
        assert "torch.distributed.barrier at test_left_alone.py:" in first, first


def stopped(stage: int) -> str:
    """Rank 1's process is stopped, and continues when rank 0 has named it."""
    engine = training.start(Run(), stage)
    engine = restart_with_patience(engine, stage)
    training.train(engine, Run(), 0, 2)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.set("pid", str(os.getpid()))
        store.wait(["seen"])
        return outcome(lambda: training.train(engine, Run(), 2, 3))
    victim = int(store.get("pid"))
    os.kill(victim, signal.SIGSTOP)
    store.set("seen", "1")
    try:
        return outcome(lambda: training.train(engine, Run(), 2, 3))
    finally:
        os.kill(victim, signal.SIGCONT)


def restart_with_patience(engine: Any, stage: int, seconds: float = 3.0) -> Any:
    import zero_core

    engine.destroy()
    config = {**training.config(Run(), stage, dist.get_world_size()), "comm": {"stopped_after": seconds}}
    return zero_core.initialize(model=engine.module, config=config)[0]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_a_stopped_rank_is_named(stage: int) -> None:
    message, _ = run_ranks(stopped, 2, stage, timeout=60)
    assert message.startswith("PeerError") and "rank 1, which has not answered for" in message, message


def slow(stage: int) -> float:
    """Rank 1 computes for longer than a stopped rank would be waited for."""
    engine = restart_with_patience(training.start(Run(), stage), stage, 1.5)
    for number in range(2):
        if dist.get_rank() == 1 and number == 1:
            until = time.monotonic() + 5.0
            while time.monotonic() < until:
                torch.ones(100, 100) @ torch.ones(100, 100)
        training.train(engine, Run(), number, number + 1)
    return training.deviation(training.weights(engine), training.plain(Run(steps=2)))


def test_a_rank_that_is_slow_is_waited_for() -> None:
    assert all(deviation <= 1e-12 for deviation in run_ranks(slow, 2, 2, timeout=60))


def two_engines(stage: int, phase: str, folder: str) -> tuple[str, str]:
    """A generator and a discriminator; the discriminator fails on the last rank, whose process lives on."""
    one, other = training.start(Run(), stage), training.start(Run(), stage)
    failing = dist.get_rank() == dist.get_world_size() - 1
    training.train(one, Run(), 0, 1)
    message = outcome(lambda: in_phase(other, phase, folder, failing))
    return message, outcome(lambda: training.train(one, Run(), 1, 2))


@pytest.mark.parametrize(
    ("world_size", "stage", "phase"),
    [
        (2, 3, "backward"),
        *(
            pytest.param(n, stage, phase, marks=pytest.mark.soak)
            for n in (2, 3)
            for stage in STAGES
            for phase in ("forward", "backward", "step", "save", "gathered, modified")
        ),
    ],
)
def test_one_of_two_engines_fails_and_the_other_goes_on(
    world_size: int, stage: int, phase: str, tmp_path: Path
) -> None:
    *others, (ours, goes_on) = run_ranks(two_engines, world_size, stage, phase, str(tmp_path), timeout=60)
    assert ours.startswith("ArithmeticError") and goes_on == "no error"
    for theirs, they_go_on in others:
        assert f"rank {world_size - 1} failed: ArithmeticError" in theirs, theirs
        assert they_go_on == "no error"
