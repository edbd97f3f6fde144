from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_plan import estimate_zero1, estimate_zero2, estimate_zero3
from zero_plan.cli.table_command import add_table_command

PARAMS, LARGEST = 2_783_959_040, 65_798_144


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `zero-plan table` with some words and return what it printed."""

    def run(*words: str) -> str:
        parser = argparse.ArgumentParser(prog="zero-plan")
        add_table_command(parser.add_subparsers(required=True))
        arguments = parser.parse_args(["table", *words])
        assert arguments.run(arguments) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(command: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as caught:
            command(*words)
        assert caught.value.code == 2
        return capsys.readouterr().err

    return run


def test_counts_are_read_exactly_however_they_are_written(command: Any) -> None:
    expected = command("--params", "2783959040", "--largest-layer", "65798144")
    assert command("--params", "2.78395904B", "--largest-layer", "65.798144M") == expected
    assert command("--params", "2_783_959_040", "--largest-layer", "6.5798144e7") == expected


def test_all_stages_are_printed_unless_some_are_named(command: Any) -> None:
    setup = {"gpus_per_node": 8, "nodes": 2}
    words = ("--params", str(PARAMS), "--largest-layer", str(LARGEST), "--gpus-per-node", "8", "--nodes", "2")
    tables = [
        str(estimate_zero1(PARAMS, **setup)),
        str(estimate_zero2(PARAMS, **setup)),
        str(estimate_zero3(PARAMS, LARGEST, **setup)),
    ]
    printed = command(*words)
    assert all(table in printed for table in tables)
    printed = command(*words, "--stage", "3")
    assert [table in printed for table in tables] == [False, False, True]


def test_without_a_largest_layer_stage_3_is_left_out_or_asked_for(command: Any, refused: Any) -> None:
    printed = command("--params", "1B")
    assert "ZeRO stage 2" in printed and "ZeRO stage 3" not in printed
    assert "give --largest-layer, or --model" in refused("--params", "1B", "--stage", "3")


def test_json_holds_bytes(command: Any) -> None:
    words = (
        "--params",
        str(PARAMS),
        "--largest-layer",
        str(LARGEST),
        "--stage",
        "3",
        "--json",
        "--buffer-factor",
        "1.0",
    )
    (found,) = json.loads(command(*words))["estimates"]
    rows = estimate_zero3(PARAMS, LARGEST, additional_buffer_factor=1.0).rows
    assert [(row["cpu_bytes"], row["gpu_bytes"]) for row in found["rows"]] == [(r.cpu_bytes, r.gpu_bytes) for r in rows]
    assert found["rows"][0]["offload_param"] == "cpu" and found["rows"][-1]["zero_init"] is False


def test_world_sizes_print_the_published_formula(command: Any) -> None:
    printed = command("--params", "7.5B", "--world-sizes", "1,64")
    assert all(size in printed for size in ("120", "31.4", "16.6", "1.88"))
    rows = json.loads(command("--params", "7.5B", "--world-sizes", "1,64", "--json"))["model_states_per_rank"]
    assert {"stage": 3, "world_size": 64, "bytes": 1_875_000_000} in rows and len(rows) == 8


def test_a_model_by_name_is_built_without_memory(
    command: Any, refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "huge_model.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(*(nn.Linear(1 << 18, 1 << 18, bias=False) for _ in range(4)))\n"
        "class Holder:\n    model = nn.Linear(10, 10)\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert str(estimate_zero3(4 << 36, 1 << 36)) in command("--model", "huge_model:build")
    assert str(estimate_zero3(110, 110)) in command("--model", "huge_model:Holder.model")
    assert "got int" in refused("--model", "huge_model:number")
    assert "has no attribute 'absent'" in refused("--model", "huge_model:absent")
    assert "No module named 'absent_module'" in refused("--model", "absent_module:build")
    assert "TypeError: " in refused("--model", "torch.nn:Linear")
    assert "expected MODULE:NAME" in refused("--model", "huge_model")
    assert "--largest-layer goes with --params" in refused("--model", "huge_model:build", "--largest-layer", "3")


@pytest.mark.parametrize("count", ["", "B", "1.5", "0", "-3", "7x", "1kk", "nan", "inf"])
def test_what_is_no_count_is_refused(refused: Any, count: str) -> None:
    assert "expected a count such as 2783959040, 2.78B or 65M" in refused(f"--params={count}")


def test_wrong_numbers_are_refused_by_name(refused: Any) -> None:
    assert "--nodes: expected an integer >= 1, got '0'" in refused("--params", "1B", "--nodes", "0")
    assert "--world-sizes: expected an integer >= 1, got 'x'" in refused("--params", "1B", "--world-sizes", "1,x")
    assert "additional_buffer_factor" in refused("--params", "1B", "--buffer-factor", "-1")
    assert "are the two swapped?" in refused("--params", "1M", "--largest-layer", "1B")
