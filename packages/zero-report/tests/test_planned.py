"""A plan beside a run's record: what it says of a rank, and the warnings of departures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_report import RecordWriter, read_run
from zero_report.record.planned import PlanFileError, PlannedRun, RunPlan

ESTIMATE = {
    "memory": [
        {"kind": "masters", "tier": "nvme", "nbytes": 1000},
        {"kind": "parameters", "tier": "device", "nbytes": 200},
        {"kind": "activations", "tier": "device", "nbytes": 50},
    ],
    "setup": {"stage": 3, "world_size": 8, "accumulation": 1, "ranks_per_node": 4},
    "time": {"least": 0.5, "binding": "disk read"},
    "bounds": [{"resource": "disk read", "rate": 4e9}, {"resource": "links of a rank", "rate": None}],
}


def dry_run(rank: int, scale: int = 1) -> dict[str, Any]:
    """A plan of one rank, as `zero-plan model --json` prints it."""
    held = [("gathered parameters", "device", 7), ("masters", "device", 400), ("optimizer states", "nvme", 900)]
    sent = [("gather", 100), ("reduce", 60), ("control", 5)]
    return {
        "rank": rank,
        "stage": 3,
        "accumulation": 2,
        "peaks": [{"tier": "device", "nbytes": 1000 * scale}],
        "held": [{"unit": "a", "kind": kind, "tier": tier, "nbytes": nbytes * scale} for kind, tier, nbytes in held],
        "sent": [{"phase": phase, "name": "a", "sent_bytes": nbytes * scale} for phase, nbytes in sent],
    }


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_an_estimate_is_of_every_rank(tmp_path: Path) -> None:
    found = RunPlan.load(write(tmp_path / "p", ESTIMATE), 3)
    assert (found.device_bytes, found.state_bytes, found.sent_bytes) == (250, 200, None)
    assert found.rates == {"disk read": 1e9} and found.bounds["binding"] == "disk read"
    assert found.setup == {"stage": 3, "world_size": 8, "accumulation": 1}


def test_a_dry_run_is_of_the_planned_rank_with_the_nearest_number(tmp_path: Path) -> None:
    path = write(tmp_path / "p", {"world_size": 8, "ranks": [dry_run(0), dry_run(7, scale=2)]})
    near, far = RunPlan.load(path, 3), RunPlan.load(path, 4)
    assert (near.device_bytes, near.state_bytes, near.sent_bytes) == (1000, 400, 160)
    assert (far.device_bytes, far.state_bytes, far.sent_bytes) == (2000, 800, 320)
    assert near.bounds == {} and near.setup == {"stage": 3, "world_size": 8, "accumulation": 2}
    times = [{"rank": 0, "time": {"least": 1.0, "binding": "links of a rank"}, "bounds": ESTIMATE["bounds"]}]
    timed = {"world_size": 8, "ranks": [dry_run(0)], "times": times, "devices": 4}
    assert RunPlan.load(write(tmp_path / "p", timed), 0).rates == {"disk read": 1e9}


@pytest.mark.parametrize("content", [None, "{", "[]", '{"memory": []}', '{"ranks": []}', '{"ranks": [{"rank": 0}]}'])
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "p").write_text(content)
    with pytest.raises(PlanFileError, match=str(tmp_path / "p")):
        RunPlan.load(str(tmp_path / "p"), 0)


@pytest.mark.parametrize(
    ("held", "sent", "device", "expected"),
    [
        (400, 160, None, []),
        (419, 153, 900, []),
        (440, 160, None, ["weights, masters and moments take 440 bytes of memory, 10% more than the 400"]),
        (400, 80, None, ["a step sends 80 bytes to other ranks, 50% less than the 160"]),
        (400, 160, 1100, ["the peak on the device is 1,100 bytes, 10% more than the 1,000"]),
    ],
)
def test_the_third_step_is_compared(
    tmp_path: Path, held: int, sent: int, device: int | None, expected: list[str]
) -> None:
    plan = RunPlan.load(write(tmp_path / "p", {"world_size": 2, "ranks": [dry_run(0)]}), 0)
    writer = RecordWriter(tmp_path / "record", rank=0, world_size=1, background=False)
    warned: list[str] = []
    run = PlannedRun(plan, writer, {"stage": 3, "world_size": 2, "accumulation": 2}, warned.append)
    for number in (1, 2, 3, 4):
        owners = {"masters": held, "gathered": 10**6} if number == 3 else {}
        run.after_step(number, owners, 10_000 + sent * (number == 3), device if number == 3 else None)
    assert warned == [f"{text} of {tmp_path / 'p'}" for text in expected]
    writer.close()
    [note] = [note for note in read_run(tmp_path / "record").last.first.notes if note["note"] == "plan"]
    assert (note["bytes"], note["state_bytes"], note["sent_bytes"]) == (1000, 400, 160)


def test_the_plan_of_another_run_is_not_compared(tmp_path: Path) -> None:
    plan = RunPlan.load(write(tmp_path / "p", {"world_size": 2, "ranks": [dry_run(0)]}), 0)
    writer = RecordWriter(tmp_path / "record", rank=0, world_size=1, background=False)
    warned: list[str] = []
    run = PlannedRun(plan, writer, {"stage": 2, "world_size": 2, "accumulation": 1}, warned.append)
    run.after_step(3, {"masters": 1}, 1, None)
    writer.close()
    assert warned == [f"{tmp_path / 'p'} is the plan of another run: stage 3, here 2; accumulation 2, here 1"]
