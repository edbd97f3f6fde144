from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

MARK = "ZERO_LAUNCH_TEST_MARK"


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a training script of the user's into the test's folder."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return f"{tmp_path}"


@pytest.fixture
def start(tmp_path: Path, mark: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python -m zero_launch`, with a mark in the environment by which its processes are found again."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object, **kwargs: object) -> subprocess.Popen[str]:
        env = {**os.environ, MARK: mark, "TMPDIR": str(tmp_path)}
        env.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, "-m", "zero_launch", *map(str, args)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": env}
        started.append(subprocess.Popen(command, **{**options, **kwargs}))
        return started[-1]

    yield start
    for process in [*started, *marked_processes(mark)]:
        process.kill()
    for process in started:
        process.communicate()


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m zero_launch` to its end."""

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        process = start(*args)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def marked_processes(mark: str) -> list[psutil.Process]:
    """The living processes that carry the mark: the launcher of a test and all that came of it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds; False when it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Lines:
    """The lines of a pipe as they come."""

    def __init__(self, pipe) -> None:
        self.text = ""
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def _read(self, pipe) -> None:
        for line in pipe:
            self.text += line

    def have(self, pattern: str, seconds: float) -> bool:
        return wait_until(lambda: re.search(pattern, self.text) is not None, seconds)
