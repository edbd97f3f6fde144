"""The command `zero-core`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import zero_core
import zero_settings
from zero_core.cli import main
from zero_settings import Config

SOURCE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 3, "prefetch_bucket_size": 1000, "overlap_comm": True},
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], str]:
    """Write a configuration file and return its path."""

    def write(source: Any) -> str:
        path = tmp_path / "ds.json"
        path.write_text(source if isinstance(source, str) else json.dumps(source))
        return str(path)

    return write


def rows(printed: str) -> dict[str, list[str]]:
    """The table's rows: key -> value, origin, note."""
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in printed.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


def test_config_check_prints_every_value_with_its_origin_and_notes(written: Any, capsys: Any) -> None:
    assert main(["config", "check", written(SOURCE), "--world-size", "2"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["train_batch_size"] == ["8", "user", ""]
    assert found["train_micro_batch_size_per_gpu"] == ["2", "derived", ""]
    assert found["zero_optimization.stage"] == ["3", "user", ""]
    assert found["optimizer.params.betas"] == ["[0.9, 0.95]", "user", ""]
    assert found["fp16.enabled"] == ["false", "default", ""]
    assert found["zero_optimization.stage3_prefetch_bucket_size"] == ["1000", "user", "written as prefetch_bucket_size"]
    assert found["zero_optimization.overlap_comm"][2].startswith("accepted, no effect")
    assert set(found) == {row.path for row in Config.load(SOURCE, world_size=2).report()}


def test_config_check_can_leave_the_defaults_out(written: Any, capsys: Any) -> None:
    assert main(["config", "check", written(SOURCE), "--no-defaults"]) == 0
    found = rows(capsys.readouterr().out)
    assert "zero_optimization.stage" in found and "fp16.enabled" not in found


def test_config_check_prints_json_for_scripts(written: Any, capsys: Any) -> None:
    assert main(["config", "check", written(SOURCE), "--world-size", "2", "--json"]) == 0
    found = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["train_micro_batch_size_per_gpu"]["value"] == 2
    assert found["zero_optimization.stage"] == {
        "path": "zero_optimization.stage",
        "value": 3,
        "provenance": "user",
        "note": "",
    }


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({**SOURCE, "zero_optimization": {"stagee": 3}}, ["zero_optimization.stagee", "did you mean 'stage'?"]),
        ({**SOURCE, "zero_optimization": {"stage": 7}}, ["zero_optimization.stage", "7"]),
        ({**SOURCE, "train_batch_size": 7}, ["train_batch_size", "multiple of", "7"]),
        ({**SOURCE, "fp16": {"enabled": True}}, ["one precision mode"]),
        ({**SOURCE, "autotuning": {"enabled": True}, "pipeline": {"stages": 2}}, ["2 problems", "autotuning"]),
        ("{ not json", ["ds.json", "line 1"]),
    ],
)
def test_config_check_says_what_is_wrong_and_fails(source: Any, words: list[str], written: Any, capsys: Any) -> None:
    path = written(source)
    assert main(["config", "check", path, "--world-size", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and all(word in captured.err for word in words), captured.err


def test_config_check_names_a_file_that_is_not_there(capsys: Any) -> None:
    assert main(["config", "check", "nowhere.json"]) == 1
    assert "nowhere.json" in capsys.readouterr().err


def test_config_schema_is_the_schema_of_the_configuration(capsys: Any) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == Config.json_schema()


@pytest.mark.parametrize("words", [[], ["config"], ["train"], ["config", "check", "x.json", "--world-size", "0"]])
def test_a_wrong_call_ends_with_status_2_and_the_usage(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and "usage: zero-core" in capsys.readouterr().err


def test_the_command_is_installed_under_its_name() -> None:
    (script,) = entry_points(group="console_scripts", name="zero-core")
    assert script.load() is main


def test_starting_the_command_does_not_import_torch() -> None:
    script = """
import sys
from zero_core.cli import main
try:
    main(['--version'])
except SystemExit:
    pass
print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False" and done.stdout


def test_a_reader_that_stops_early_is_no_error(written: Any) -> None:
    command = [sys.executable, "-m", "zero_core.cli", "config", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


def test_a_command_of_a_package_that_is_not_installed_names_the_package(tmp_path: Path) -> None:
    for module in (zero_core, zero_settings):
        (tmp_path / module.__name__).symlink_to(Path(module.__file__).parent)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from zero_core.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", code, "verify", "train.py", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith("not installed: pip install zero-verify\n"), done.stderr
