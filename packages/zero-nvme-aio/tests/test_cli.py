"""The command does what its help says, on a small scale."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_nvme_aio import Engine, _tuning, probe
from zero_nvme_aio._copy import copy_file
from zero_nvme_aio._tuning import Tuning
from zero_nvme_aio.cli import main


def test_probe_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe"]) == 0
    assert f"{probe().chosen:<10} chosen" in capsys.readouterr().out


@pytest.mark.parametrize("nbytes", [0, 1, 5000, (40 << 20) + 3])
def test_cp_copies_content_and_permissions(tmp_path: Path, nbytes: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(nbytes))
    source.chmod(0o640)
    (tmp_path / "folder").mkdir()
    assert main(["cp", str(source), str(tmp_path / "target")]) == 0
    assert main(["cp", "--verify", str(source), str(tmp_path / "folder")]) == 0
    for copy in (tmp_path / "target", tmp_path / "folder" / "source"):
        assert copy.read_bytes() == source.read_bytes()
        assert copy.stat().st_mode == source.stat().st_mode
    assert len(list(tmp_path.iterdir())) == 3


def test_errors_are_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", str(tmp_path / "missing"), str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--png", "missing/plot.png"], "'missing/plot.png': No such file or directory"),
        (["--depth", "0"], "expected queue_depth to be an integer from 1 to 4096, got 0"),
    ],
)
def test_errors_of_the_system_and_of_settings_are_one_line_too(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    pytest.importorskip("rich")
    if "--png" in options:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    command = ["bench", "--path", ".", "--size", "1M", "--kind", "read", "--block", "64K", "--repeat", "1", "--no-fio"]
    assert main([*command, *options]) == 1
    assert capsys.readouterr().err == f"zero-nvme-aio: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_bench_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    command = ["bench", "--path", str(tmp_path), "--size", "4M", "--block", "64K", "1M", "--repeat", "1", "--no-fio"]
    sweep = ["--kind", "read", "write", "mixed", "--memory", "aligned", "plain", "--backend", "threads", "auto"]
    assert main([*command, *sweep]) == 0
    out = capsys.readouterr().out
    assert "GB/s" in out
    assert "mixed" in out
    assert list(tmp_path.iterdir()) == []
    if importlib.util.find_spec("matplotlib") is not None:
        assert main([*command, "--png", str(tmp_path / "plot.png")]) == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


BENCH_WITH_PEERS = ["--size", "4M", "--block", "1M", "--repeat", "1", "--memory", "aligned", "plain"]


@pytest.mark.peer
def test_bench_measures_fio_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "--path", str(tmp_path), *BENCH_WITH_PEERS]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("fio libaio", "fio io_uring"))


@pytest.mark.soak  # DeepSpeed compiles its extension first
@pytest.mark.peer
def test_bench_measures_deepspeed_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    command = ["bench", "--path", str(tmp_path), *BENCH_WITH_PEERS, "--no-fio", "--deepspeed"]
    status, (out, err) = main(command), capsys.readouterr()
    if importlib.util.find_spec("deepspeed") is None:
        assert status == 1
        assert "pip install deepspeed" in err
        return
    if "not usable" in err:
        pytest.skip(err)
    assert status == 0
    assert "DeepSpeed pinned" in out
    assert "DeepSpeed unpinned" in out


def test_tune_remembers_and_engines_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _tuning.lookup(str(tmp_path)) is None
    assert main(["tune", "--path", str(tmp_path), "--size", "4M", "--seconds", "1"]) == 0
    found = _tuning.lookup(str(tmp_path / "a file that does not exist yet"))
    assert found is not None
    with Engine.for_path(tmp_path) as io:
        assert (io.block_bytes, io.queue_depth, io.threads) == (found.block_bytes, found.queue_depth, found.threads)
    _tuning.remember(str(tmp_path), Tuning("threads", 65536, 3, 1, 1.0, 1.0))
    with Engine() as io, io.open(tmp_path / "f", "w") as file:
        io.write(file, bytes(1 << 20), 0).wait()
        assert io.counters()["blocks"] == 16
    with Engine(block_bytes=1 << 20) as io, io.open(tmp_path / "f", "w") as file:
        io.write(file, bytes(1 << 20), 0).wait()
        assert io.counters()["blocks"] == 1


@pytest.mark.parametrize("entry", ["nonsense", {"block_bytes": 5}, {"backend": "x"}, None, 3])
def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(_tuning.cache_path())
    path.parent.mkdir()
    good = Tuning("threads", 65536, 3, 1, 1.0, 1.0)._asdict()
    damaged = {**good, **entry} if isinstance(entry, dict) else entry
    path.write_text(json.dumps({_tuning.device_key(str(tmp_path)): damaged}))
    assert _tuning.lookup(str(tmp_path)) is None
    path.write_text("{")
    assert _tuning.lookup(str(tmp_path)) is None


def test_the_command_is_installed() -> None:
    done = subprocess.run([sys.executable, "-m", "zero_nvme_aio.cli", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("probe", "bench", "tune", "cp"))


@pytest.fixture
def on_a_terminal(tmp_path: Path, read_terminal: Callable[[int], bytes]) -> Callable[..., str]:
    """Return a function that runs the command in the test's folder with a terminal as standard error, and as standard
    output without ``stdout``, and returns what the terminal got."""

    def run(*words: str, stdout: int | None = None) -> str:
        ours, theirs = os.openpty()
        command = [sys.executable, "-m", "zero_nvme_aio.cli", *words]
        environment = {**os.environ, "COLUMNS": "100", "XDG_CACHE_HOME": str(tmp_path)}
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=theirs, stdout=theirs if stdout is None else stdout
        )
        os.close(theirs)
        shown = read_terminal(ours)
        assert job.wait() == 0, shown
        return shown.decode()

    return run


def test_cp_shows_progress_on_a_terminal_alone(tmp_path: Path, on_a_terminal: Callable[..., str]) -> None:
    (tmp_path / "weights").write_bytes(bytes(40 << 20))
    words = ["cp", "--verify", "weights", "copy"]
    command = [sys.executable, "-m", "zero_nvme_aio.cli", *words]
    quiet = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"", b"")
    text = on_a_terminal(*words)
    assert "cp weights" in text and "83.9/83.9 MB" in text, text


TUNE = ("tune", "--path", ".", "--size", "1M", "--dry-run")


def test_measurements_show_progress_on_a_terminal(on_a_terminal: Callable[..., str]) -> None:
    pytest.importorskip("rich")
    text = on_a_terminal(*TUNE)
    lines = [line.rpartition("\x1b[2K")[2].rstrip() for line in text.splitlines()]
    assert "24/24" in text and sum(line.startswith("block ") for line in lines) == 24, text
    bench = ["bench", "--path", ".", "--size", "1M", "--block", "64K", "256K", "--repeat", "1", "--no-fio"]
    assert "8/8" in on_a_terminal(*bench)


def test_a_file_gets_the_lines_of_tune_and_the_terminal_only_the_bar(
    tmp_path: Path, on_a_terminal: Callable[..., str]
) -> None:
    pytest.importorskip("rich")
    with (tmp_path / "lines").open("wb") as lines:
        text = on_a_terminal(*TUNE, stdout=lines.fileno())
    written = (tmp_path / "lines").read_text()
    assert "24/24" in text and "GB/s" not in text, text
    assert written.count("block ") == 24 and "best: " in written and "\x1b" not in written


@pytest.mark.parametrize("verify", [False, True])
def test_a_copy_tells_its_progress_in_bytes(tmp_path: Path, verify: bool) -> None:
    (tmp_path / "source").write_bytes(os.urandom((40 << 20) + 3))
    told: list[int] = []
    with Engine() as io:
        copy_file(tmp_path / "source", tmp_path / "copy", engine=io, verify=verify, progress=told.append)
    assert sum(told) == ((40 << 20) + 3) * (2 if verify else 1) and len(told) == (6 if verify else 3)
