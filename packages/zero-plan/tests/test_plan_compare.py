"""A plan beside the record of a real run, on the terminal and as a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import dry_models
import pytest
from dry_models import Case, tokens

from zero_comm import run_ranks
from zero_plan import Plan, PlanError, compare, load_machine, plan
from zero_plan.cli.plan_printing import print_plan

HOST, NVME = {"device": "cpu"}, {"device": "nvme"}
CASES = {
    "device": Case(stage=2, accumulation=2, settings=(("bf16", {"enabled": True}), ("comm", {"ranks_per_node": 1}))),
    "host": Case(stage=3, zero=(("offload_optimizer", HOST),)),
    "nvme": Case(stage=3, zero=(("offload_param", NVME), ("offload_optimizer", NVME))),
}


def train(folder: str, steps: int) -> None:
    """Train every case on this job's ranks, with its record and its files in ``folder``."""
    import zero_core

    for name, case in CASES.items():
        config = {**case.config(f"{folder}/tier"), "run_record": {"path": f"{folder}/{name}"}}
        engine = zero_core.initialize(model=case.model(), config=config)[0]
        for _ in range(steps * case.accumulation):
            engine.backward(engine(**tokens()))
            engine.step()
        engine.destroy(unshard=False)


def train_with_plan(case: Case, folder: str, path: str) -> list[str]:
    """Train four steps with a plan; return the warnings in this rank's record."""
    import zero_core
    from zero_report import read_run

    record = {"path": f"{folder}/record", "plan": path}
    engine = zero_core.initialize(model=case.model(), config={**case.config(folder), "run_record": record})[0]
    for _ in range(4 * case.accumulation):
        engine.backward(engine(**tokens()))
        engine.step()
    rank = engine.partition.rank
    engine.destroy(unshard=False)
    notes = read_run(f"{folder}/record").last.ranks[rank].notes
    return [note["text"] for note in notes if note["note"] == "warning"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    run_ranks(train, 2, str(folder), 5)
    return folder


def planned(case: Case, world_size: int = 2) -> Plan:
    return plan(case.model, case.config(), batch=tokens(), world_size=world_size)


@pytest.mark.parametrize("name", CASES)
def test_states_and_bytes_of_a_record_are_those_of_the_plan(records: Path, name: str) -> None:
    machine = load_machine("dgx-2").with_values({"disk.read": "1 TB/s", "disk.write": "1 TB/s"})
    rows = compare(planned(CASES[name]), records / name, machine)
    by_name = {(row.rank, row.what): row for row in rows}
    for rank in (0, 1):
        sent = [row for row in rows if row.rank == rank and row.what.startswith("sent, ") and row.what != "sent, all"]
        assert len(sent) >= 2 and all(row.error == 0 for row in sent), sent
        states = [row for row in rows if row.rank == rank and row.what.endswith(" in memory")]
        assert all(row.error == 0 for row in states), states
        assert states or name == "nvme"
        time = by_name[rank, "time of a step"]
        assert time.is_bound and 0 < time.planned < time.measured
        drives = [by_name.get((rank, what)) for what in ("read from drives", "written to drives")]
        assert all(row is not None and row.planned > 0 for row in drives) == (name == "nvme")
    assert (by_name.get((0, "sent to other nodes")) is not None) == (name == "device")


def test_a_run_that_departs_from_its_plan_shows_by_how_much(records: Path) -> None:
    wrong = planned(CASES["device"]._replace(model=dry_models.tied_decoder))
    rows = {(row.rank, row.what): row for row in compare(wrong, records / "device")}
    found = rows[0, "states in memory"]
    assert found.error == pytest.approx(found.planned / found.measured - 1) and found.error < -0.15


def test_an_engine_with_a_plan_of_a_dry_run_warns_where_it_departs_from_it(tmp_path: Path) -> None:
    case, path = CASES["device"], tmp_path / "plan.json"
    path.write_text(json.dumps(planned(case).as_dict()))
    assert run_ranks(train_with_plan, 2, case, str(tmp_path / "same"), str(path)) == [[], []]
    path.write_text(json.dumps(planned(case._replace(model=dry_models.tied_decoder)).as_dict()))
    for warnings in run_ranks(train_with_plan, 2, case, str(tmp_path / "wider"), str(path)):
        assert len(warnings) == 2, warnings
        assert warnings[0].startswith("weights, masters and moments take") and "more than the" in warnings[0]
        assert warnings[1].startswith("a step sends") and warnings[1].endswith("plan.json")
    path.write_text(json.dumps(planned(case._replace(stage=1)).as_dict()))
    [[warning], _] = run_ranks(train_with_plan, 2, case, str(tmp_path / "other"), str(path))
    assert warning.endswith("is the plan of another run: stage 1, here 2")


def test_the_command_prints_json_and_a_page(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(compare=str(records / "device"), json=False, html=str(tmp_path / "plan.html"))
    assert print_plan(planned(CASES["device"]), None, options, "plan <of> mine") == 0
    assert "planned, and measured in" in capsys.readouterr().out
    page = (tmp_path / "plan.html").read_text()
    assert "plan &lt;of&gt; mine" in page and "rank 1 of 2: sent in a step" in page and "<script" not in page
    options = argparse.Namespace(compare=str(records / "device"), json=True, html=None)
    print_plan(planned(CASES["device"]), None, options, "mine")
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"rank", "what", "unit", "planned", "measured", "error", "is_bound"} == set(data["compared"][0])
    options = argparse.Namespace(compare=None, json=False, html=str(tmp_path / "plan.html" / "x.html"))
    with pytest.raises(PlanError, match="cannot be written"):
        print_plan(planned(CASES["device"]), None, options, "mine")


def test_a_record_that_cannot_be_compared_is_refused_in_a_sentence(records: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected a run of 4 ranks, as planned, got 2"):
        compare(planned(CASES["device"], 4), records / "device")
    with pytest.raises(PlanError, match="expected a record"):
        compare(planned(CASES["device"]), tmp_path)
