"""Checkpoints that `engine.step` writes by itself: every so many steps, or as often as they are worth it."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engine_cases import RANKS, batch, build, config, outcome, train, weights

import zero_core
from zero_ckpt.save_interval import IntervalChooser, choose_interval
from zero_comm import run_ranks
from zero_core.checkpoint.periodic import check_interval
from zero_settings import Config, ConfigError

HOUR = 3600.0


@pytest.mark.parametrize(
    ("step", "held", "written", "hours", "steps", "reason"),
    [
        (0.5, 1.4, 1.4, None, 80, "at most 0.035 of the time"),
        (0.5, 0.01, 9.8, None, 20, "written before the next begins"),
        (0.5, 1.4, 1.4, 4.0, 402, "Young, Daly"),  # sqrt(2 * 1.4 * 14400) is 200.8 s
        (0.5, 1.4, 1.4, 0.01, 80, "at most 0.035 of the time"),  # failures more often than saves are affordable
        (100.0, 1.4, 1.4, None, 1, "at most 0.035 of the time"),
    ],
)
def test_the_interval_is_the_least_that_all_bounds_allow(
    step: float, held: float, written: float, hours: float | None, steps: int, reason: str
) -> None:
    between = None if hours is None else hours * HOUR
    chosen = choose_interval(step, held, written, overhead=0.035, between_failures=between)
    assert chosen.steps == steps and reason in chosen.reason


def test_what_is_measured_decides_and_changes_are_followed() -> None:
    """Steps of one second; a save at once, then background saves that hold up the steps after them."""
    chooser, now, saves = IntervalChooser(0.1, None), 0.0, []

    def steps_until_due() -> int:
        nonlocal now
        for count in range(1, 1000):
            due = chooser.is_due()
            now += 1.0
            chooser.step_ended(now)
            if due:
                return count
        raise AssertionError("never due")

    for _ in range(3):
        saves.append(steps_until_due())
        chooser.save_began(now)
        now += 2.0
        chooser.save_returned(now)
        chooser.save_completed(now)
    assert saves == [5, 20, 20]
    for _ in range(
        5
    ):  # 0.5 s at once, 0.25 s waiting, 0.25 s of sharing, and a pause of the user's, which is not counted
        saves.append(steps_until_due())
        chooser.save_began(now)
        now += 0.5
        chooser.save_returned(now)
        for waited, more in ((0.25, 0.0), (0.0, 0.25), (0.0, 100.0)):
            now += 1.0 + waited + more
            chooser.step_ended(now, waited)
            assert not chooser.is_due()
        chooser.save_completed(now)
    assert chooser.held_seconds == pytest.approx(2.0) and chooser.step_seconds == 1.0


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step")) for path in folder.glob("global_step*"))


def fixed(folder: str, stage: int, behind: bool) -> dict[str, Any]:
    """Two micro-batches a step, a save every three steps by itself, and a run that resumes from the last."""
    settings = config(stage, gradient_accumulation_steps=2)
    settings["checkpoint"] = {"interval": 3, "keep_last": 2, "writer": {"decoupled": behind}}
    engine = zero_core.initialize(model=build(), config=settings)[0]
    nothing_yet = engine.resume(folder)
    for number in range(2 * 11):
        engine.backward(engine(*batch(number)))
        engine.step()
        if number == 2 * 9 - 1:
            at_nine = weights(engine)
    engine.destroy()
    again = zero_core.initialize(model=build(seed=1), config=settings)[0]
    resumed = again.resume(folder)
    same = all(value.equal(at_nine[name]) for name, value in weights(again).items())
    again.destroy()
    return {"nothing": nothing_yet, "step": resumed and resumed.step, "same": same}


@pytest.mark.parametrize(("stage", "behind"), [(0, False), (3, True)])
def test_a_fixed_interval_saves_by_itself_and_the_newest_resumes(stage: int, behind: bool, tmp_path: Path) -> None:
    for seen in run_ranks(fixed, RANKS, str(tmp_path), stage, behind):
        assert seen == {"nothing": None, "step": 9, "same": True}
    assert saved(tmp_path) == [6, 9]


class Lines(logging.Handler):
    """What was logged about intervals."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "a checkpoint every" in record.getMessage():
            self.told.append(record.getMessage())


def automatic(folder: str, stage: int, behind: bool, hours: float | None) -> tuple[list[str], tuple[int, int]]:
    """Ranks of different speed; what is logged, and the number of messages of ordinary steps."""
    lines = Lines()
    logging.getLogger("zero_core").addHandler(lines)
    settings = config(stage)
    settings["checkpoint"] = {
        "interval": "auto",
        "path": folder,
        "overhead": 0.5,
        "writer": {"decoupled": behind},
        **({} if hours is None else {"mean_time_between_failures": hours}),
    }
    engine = zero_core.initialize(model=build(), config=settings)[0]
    train(engine, 0, 1)
    before = engine.ledger.calls("control"), engine.ledger.sent_bytes("control")
    train(engine, 1, 4)
    sent = engine.ledger.calls("control") - before[0], engine.ledger.sent_bytes("control") - before[1]
    for number in range(4, 60):
        engine.backward(engine(*batch(number)))
        time.sleep(0.005 * dist.get_rank())
        engine.step()
    engine.destroy()
    return lines.told, sent


def ordinary(stage: int) -> tuple[int, int]:
    """The messages of the same steps without an interval."""
    engine = zero_core.initialize(model=build(), config=config(stage))[0]
    train(engine, 0, 1)
    before = engine.ledger.calls("control"), engine.ledger.sent_bytes("control")
    train(engine, 1, 4)
    sent = engine.ledger.calls("control") - before[0], engine.ledger.sent_bytes("control") - before[1]
    engine.destroy()
    return sent


@pytest.mark.parametrize(("stage", "behind"), [(0, True), (3, False)])
def test_rank_0_chooses_for_all_says_why_and_adapts(stage: int, behind: bool, tmp_path: Path) -> None:
    found = run_ranks(automatic, RANKS, str(tmp_path), stage, behind, None)
    assert [sent for _, sent in found] == run_ranks(ordinary, RANKS, stage)
    told = [lines for lines, _ in found]
    assert told[0] and not told[1]
    match = re.search(r"every (\d+) steps \(.* s\): a save holds training up .* s, a step takes .* s; .+", told[0][0])
    assert match is not None, told
    steps = saved(tmp_path)
    assert steps[0] == 5 and len(steps) > 1 and steps == sorted(set(steps))
    assert steps[1] - steps[0] >= int(match[1])


def test_rare_failures_make_saves_rare(tmp_path: Path) -> None:
    told = run_ranks(automatic, 1, str(tmp_path), 2, False, 1000.0)[0][0]
    assert "1e+03 h between failures" in told[0] and "Young, Daly" in told[0]
    assert saved(tmp_path) == [5]


def without_a_folder(interval: Any) -> str:
    engine = zero_core.initialize(model=build(), config={**config(1), "checkpoint": {"interval": interval}})[0]
    before = weights(engine)
    told = outcome(lambda: train(engine, 0, 1))
    unchanged = all(value.equal(before[name]) for name, value in weights(engine).items())
    engine.destroy()
    return f"{told} unchanged={unchanged}"


def test_without_a_folder_the_first_step_says_what_to_do() -> None:
    for interval in (2, "auto"):
        for told in run_ranks(without_a_folder, RANKS, interval):
            assert "UsageError" in told and "checkpoint.path" in told and "engine.resume" in told
            assert told.endswith("unchanged=True")


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"interval": "sometimes"}, "checkpoint.interval"),
        ({"interval": 0}, "checkpoint.interval"),
        ({"interval": "auto", "overhead": 0}, "checkpoint.overhead"),
        ({"interval": "auto", "overhead": 1}, "checkpoint.overhead"),
        ({"interval": "auto", "mean_time_between_failures": 0}, "checkpoint.mean_time_between_failures"),
        ({"interval": 5, "mean_time_between_failures": 3}, "checkpoint.mean_time_between_failures"),
        ({"path": "somewhere"}, "checkpoint.path"),
        ({"keep_last": 0}, "checkpoint.keep_last"),
    ],
)
def test_keys_that_mean_nothing_are_refused_by_name(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Config.load({"train_batch_size": 1, "checkpoint": section}, world_size=1)


def test_under_an_mpu_the_interval_is_a_number() -> None:
    loaded = Config.load({"train_batch_size": 1, "checkpoint": {"interval": "auto", "path": "x"}}, world_size=1)
    with pytest.raises(zero_core.UsageError, match="mpu"):
        check_interval(loaded, is_whole=False)
