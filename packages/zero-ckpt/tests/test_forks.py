"""A process that forks in the midst of a save loses nothing by it: the child holds no lock that anyone waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from zero_ckpt import AsyncSaver, CheckpointError, Interval, open_checkpoint, save_sharded

FILES = {"commit.py", "latest.py", "locking.py", "durable.py", "saving.py", "retention.py", "scripts.py"}


def interval(step: int) -> list[Interval]:
    return [Interval("w", "param", (8,), "U8", 0, bytes([step]) * 8)]


class ForkAt:
    """A trace function that forks when the `at`-th line of the saving code runs; the child sleeps on."""

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.child = at, 0, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in FILES or "zero_ckpt" not in frame.f_code.co_filename:
            return None
        if event == "line":
            if self.lines == self.at:
                self.child = os.fork()
                if self.child == 0:
                    signal.pause()
                    os._exit(0)
            self.lines += 1
        return self


def save_with_fork(root: Path, at: int) -> ForkAt:
    """Save in the background with a fork at one line; then saves of the parent must continue as if nothing were."""
    fork = ForkAt(at)
    threading.settrace(fork)
    try:
        with AsyncSaver() as saver:
            saver.save(root, "a", interval(1), step=1, keep_last=1)
            saver.wait()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    begin = time.monotonic()
    try:
        save_sharded(root, "a", interval(2), step=2)
        save_sharded(root, "b", interval(3), step=3, keep_last=1)
        assert time.monotonic() - begin < 5, f"the fork at line event {at} left a lock"
        assert open_checkpoint(root).read("w", "param") == b"\3" * 8
        assert sorted(path.name for path in root.iterdir()) == ["b", "latest", "zero_to_fp32.py"]
    finally:
        if fork.child:
            os.kill(fork.child, signal.SIGKILL)
            os.waitpid(fork.child, 0)
    return fork


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.timeout(120)
def test_a_fork_during_a_background_save_leaves_no_lock(tmp_path: Path) -> None:
    lines = save_with_fork(tmp_path / "count", -1).lines
    assert lines > 100
    for at in range(0, lines, max(1, lines // 16)):
        save_with_fork(tmp_path / str(at), at)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_at_every_line_of_a_background_save_leaves_no_lock(tmp_path: Path) -> None:
    lines = save_with_fork(tmp_path / "count", -1).lines
    forks = sum(save_with_fork(tmp_path / str(at), at).child != 0 for at in range(lines))
    print(f"{forks} forks, one at each line event of a save: no save waited")
    assert forks >= lines - 5


def test_a_killed_holder_whose_child_lives_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from zero_ckpt import CheckpointError, locking

    monkeypatch.setattr(locking, "_SPEAK_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(locking, "_GIVE_UP_AFTER_SECONDS", 0.5)
    child = os.fork()
    if child == 0:
        fd = os.open(tmp_path, os.O_RDONLY)
        locking.try_lock(fd)
        (tmp_path / "locked").touch()
        signal.pause()
        os._exit(0)
    try:
        while not (tmp_path / "locked").exists():
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match=rf"is locked by process {child} .*end that process"):
            save_sharded(tmp_path, "a", interval(1), step=1)
        assert f"waiting for the lock of {tmp_path}, which process {child} holds" in caplog.text
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    save_sharded(tmp_path, "a", interval(1), step=1)


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.timeout(60)
def test_a_forked_process_does_not_wait_for_a_save_of_its_parent(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        running = threading.Event()
        saver.save(tmp_path, "a", interval(1), step=1, first=running.wait)
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # ends it where it would hang
            refused = 0
            for call in (saver.wait, lambda: saver.save(tmp_path, "b", interval(2), step=2)):
                try:
                    call()
                except CheckpointError as error:
                    refused += "was forked; make one after the fork" in str(error)
            saver.copied()
            saver.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        running.set()
    assert open_checkpoint(tmp_path).step == 1
