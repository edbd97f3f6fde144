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
    record_in(tmp_path).touch(0o600)
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


SECOND_USER = """
import os, sys
from zero_nvme_aio import _tuning
from zero_nvme_aio.path_rates import measure_paths
os.setgid(65534)
os.setuid(65534)
os.umask(0)
print(measure_paths(sys.argv[1:])[0], measure_paths(sys.argv[1:])[0])
"""


def as_second_user(folder: Path) -> tuple[float, float]:
    """The rates that another user finds in a folder, twice in a row."""
    done = subprocess.run([sys.executable, "-c", SECOND_USER, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    return first, second


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_another_users_record_is_not_used_and_does_not_stand_in_the_way(shared_folder: Path, mode: int) -> None:
    folder = shared_folder
    entry = {"bytes_per_s": 5.0, "device": os.stat(folder).st_dev, "measured_at": time.time()}
    record_in(folder).write_text(json.dumps(entry))
    record_in(folder).chmod(mode)
    first, second = as_second_user(folder)
    assert first == second > 1e5
    assert json.loads(record_in(folder).read_text()) == entry
    if mode != 0o666:
        assert measure_paths([folder]) == [5.0]


@pytest.mark.parametrize("trap", ["owner", "link", "folder", "pipe"])
def test_a_record_that_somebody_else_put_there_is_not_used(tmp_path: Path, trap: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("being two users needs root")
    entry = {"bytes_per_s": 5.0, "device": os.stat(tmp_path).st_dev, "measured_at": time.time()}
    for name in (record_in(tmp_path).name, f"path-rate.{os.uname().nodename}.{os.geteuid()}.json"):
        path = tmp_path / name
        if trap == "owner":
            path.write_text(json.dumps(entry))
            os.chown(path, 65534, 65534)
        elif trap == "link":
            (tmp_path / "elsewhere").write_text(json.dumps(entry))
            path.symlink_to("elsewhere")
        elif trap == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
    (rate,) = measure_paths([tmp_path])
    assert rate > 1e5
    if trap == "link":
        assert json.loads((tmp_path / "elsewhere").read_text()) == entry
