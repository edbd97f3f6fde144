"""Each folder is measured once by the processes of a host, and the result lies beside its stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zero_nvme_aio.path_rates import measure_paths


def record_in(folder: Path) -> Path:
    return folder / f"path-rate.{os.uname().nodename}.json"


def test_a_folder_is_measured_once_and_left_clean(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    rates = measure_paths(folders)
    assert all(rate > 1e5 for rate in rates)
    assert [json.loads(record_in(folder).read_text())["bytes_per_s"] for folder in folders] == rates
    assert measure_paths([folders[1], folders[0]]) == rates[::-1]
    assert [list(folder.iterdir()) for folder in folders] == [[record_in(folder)] for folder in folders]


@pytest.mark.parametrize(
    "change", [{"measured_at": 0.0}, {"device": -1}, {"bytes_per_s": 0.0}, {"measured_at": time.time() + 1e6}, None]
)
def test_a_record_that_is_old_or_wrong_is_replaced(tmp_path: Path, change: dict[str, float] | None) -> None:
    entry = {"bytes_per_s": 5.0, "device": os.stat(tmp_path).st_dev, "measured_at": time.time()}
    record_in(tmp_path).write_text(json.dumps(entry))
    assert measure_paths([tmp_path]) == [5.0]
    record_in(tmp_path).write_text("{" if change is None else json.dumps({**entry, **change}))
    (rate,) = measure_paths([tmp_path])
    assert rate > 1e5
    assert measure_paths([tmp_path]) == [rate]


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    code = f"from zero_nvme_aio.path_rates import measure_paths; print(measure_paths([{str(tmp_path)!r}]))"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in started}
    assert len(said) == 1 and said.pop().startswith("[")


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file/no folder"):
        measure_paths([tmp_path / "file" / "no folder"])
