"""A job of `kill_worker.py` from outside: start it, end it by force, and see what it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kill_worker import content

from zero_ckpt import Interval, open_checkpoint, save_sharded, verify

WORKER = Path(__file__).with_name("kill_worker.py")


class Job:
    """Ranks that save into `root`, with sealed files in `store`. `notes` may be on another file system."""

    def __init__(self, root: Path, store: Path, notes: Path, world_size: int, nbytes: int, how: str) -> None:
        for folder in (store, notes):
            folder.mkdir(parents=True, exist_ok=True)
        self.root, self.notes, self.nbytes = root, notes, nbytes
        command = [sys.executable, str(WORKER), str(root), str(store), str(notes), str(world_size), str(nbytes), how]
        self.process = subprocess.Popen(command, start_new_session=True)

    def saved(self) -> int:
        """The step of the newest save that has returned, 0 when none has."""
        lines = (self.notes / "saved").read_text().splitlines() if (self.notes / "saved").exists() else []
        return max(map(int, lines), default=0)

    def wait_for_first(self) -> None:
        deadline = time.monotonic() + 20
        while not self.saved():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.002)

    def ranks(self) -> list[int]:
        """The process ids of ranks that live."""
        pids = (self.notes / "pids").read_text().split() if (self.notes / "pids").exists() else []
        return [int(pid) for pid in pids if _state(pid) not in ("", "Z")]

    def wait(self, seconds: float = 10) -> None:
        """Wait until every rank has ended."""
        deadline = time.monotonic() + seconds
        self.process.wait(seconds)
        while self.ranks():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def kill(self) -> None:
        if self.ranks() or self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _state(pid: str) -> str:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def check(root: Path, nbytes: int, saved: int) -> int:
    """Assert what a job left: a whole checkpoint at least as new as every save that returned, and a root that
    continues.

    Returns the step that was opened.
    """
    checkpoint = open_checkpoint(root)
    step = checkpoint.step
    assert step >= saved, f"step {saved} was saved, and step {step} is opened: {checkpoint.report}"
    assert checkpoint.read("w", "param") == checkpoint.read("linked", "exp_avg") == content(step, nbytes)
    assert verify(checkpoint.path).ok
    assert checkpoint.client_state["step"] == step
    assert (root / "zero_to_fp32.py").stat().st_size > 0
    save_sharded(root, "after", [Interval("w", "param", (1,), "U8", 0, b"!")], step=99_999)
    assert open_checkpoint(root).tag == "after"
    left = [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert not left, left
    return step
