"""Relative folders are those of the folder in which the script was when it named them, wherever it goes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import build, config, train

import zero_core
from zero_ckpt import open_checkpoint
from zero_comm import run_ranks

NVME = {"device": "nvme", "nvme_path": "there"}
CONFIGURED: dict[str, dict[str, Any]] = {
    "saves by interval": {"checkpoint": {"interval": 1, "path": "there/out"}},
    "resumed": {"checkpoint": {"interval": 1}},
    "behind": {"checkpoint": {"interval": 1, "path": "there/out", "writer": {"decoupled": True}}},
    "tiers": {
        "checkpoint": {"interval": 1, "path": "there/out"},
        "zero_optimization": {"stage": 3, "unit_min_numel": 1, "offload_optimizer": NVME, "offload_param": NVME},
    },
    "copies in memory": {
        "checkpoint": {"interval": 1, "path": "there/out", "in_memory": {"every": 1, "path": "there/memory"}}
    },
    "monitor": {
        "checkpoint": {"interval": 1, "path": "there/out"},
        "csv_monitor": {"enabled": True, "output_path": "there/csv", "job_name": "job"},
    },
}


def goes_elsewhere(root: str, changes: dict[str, Any]) -> list[str]:
    """The names in the folder to which the script goes after `initialize` and `resume`."""
    there, elsewhere = Path(root, "there"), Path(root, "elsewhere")
    there.mkdir(mode=0o700)
    elsewhere.mkdir()
    with pytest.MonkeyPatch.context() as script:
        script.chdir(root)
        engine = zero_core.initialize(model=build(), config=config(2, **changes))[0]
        engine.resume("there/out")
        script.chdir(elsewhere)
        train(engine, 0, 2)
        engine.save_checkpoint("own", tag="t")
        script.chdir(root)
        engine.destroy()
    assert open_checkpoint(elsewhere / "own").tag == "t"
    assert open_checkpoint(there / "out").step == 2
    if "in_memory" in changes["checkpoint"]:
        assert list((there / "memory").glob("*")) != []
    if "csv_monitor" in changes:
        assert list((there / "csv" / "job").glob("*.csv")) != []
    return [path.name for path in elsewhere.iterdir()]


def removed(root: str) -> list[str]:
    """Return the errors of calls with relative paths once the script's working directory is gone."""
    told = []
    gone = Path(root, "gone")
    gone.mkdir()
    with pytest.MonkeyPatch.context() as script:
        script.chdir(gone)
        engine = zero_core.initialize(model=build(), config=config(2))[0]
        gone.rmdir()
        for call in (
            lambda: engine.save_checkpoint("out"),
            lambda: engine.load_checkpoint("out"),
            lambda: engine.resume("out"),
            lambda: zero_core.initialize(model=build(), config="ds.json"),
            lambda: zero_core.initialize(model=build(), config=config(2, checkpoint={"interval": 1, "path": "out"})),
            lambda: zero_core.initialize(model=build(), config=config(2, csv_monitor={"enabled": True})),
        ):
            try:
                call()
                told.append("returned")
            except Exception as error:
                told.append(str(error))
        script.chdir(root)
        engine.destroy()
    return told


def test_calls_with_relative_paths_say_when_the_working_directory_is_gone(tmp_path: Path) -> None:
    (told,) = run_ranks(removed, 1, str(tmp_path))
    assert all("the working directory no longer exists" in text for text in told), told


@pytest.mark.parametrize("case", CONFIGURED)
def test_relative_folders_stay_where_they_were_named(case: str, tmp_path: Path) -> None:
    assert run_ranks(goes_elsewhere, 1, str(tmp_path), CONFIGURED[case]) == [["own"]]
