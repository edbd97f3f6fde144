"""A system call of a save fails, or the process dies in it: a typed error, nothing lost, and the next save is good."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs_that_save import check
from kill_worker import content

from zero_ckpt import open_checkpoint, verify

WORKER = Path(__file__).with_name("injected_worker.py")
NBYTES = {"now": 1 << 16, "behind": 1 << 16, "direct": 5 << 20}
FAILURES = {
    **dict.fromkeys(["openat", "open"], ("EIO", "EMFILE", "EACCES")),
    **dict.fromkeys(["write", "pwrite64", "pwritev", "pwritev2", "fallocate", "ftruncate"], ("EIO", "ENOSPC")),
    **dict.fromkeys(["mkdir", "rename", "renameat2", "link", "linkat"], ("EIO", "ENOSPC")),
    **dict.fromkeys(["fsync", "fdatasync", "close", "unlink", "unlinkat", "rmdir", "ioctl", "chmod"], ("EIO",)),
    **dict.fromkeys(["fstat", "newfstatat", "statx", "lseek", "getdents64", "flock", "fcntl", "getrandom"], ("EIO",)),
    **dict.fromkeys(["read", "pread64", "preadv", "readlink"], ("EIO", "EINTR")),
    **dict.fromkeys(["clone3", "clone"], ("EAGAIN",)),
    **dict.fromkeys(["io_uring_setup", "io_uring_enter", "io_uring_register", "io_submit", "io_getevents"], ("EPERM",)),
}
"""The errors that each call can answer. A call that is not here is made by threads and memory alone, or by nothing."""
PROMISES = ("fsync", "fdatasync", "rename", "mkdir", "pwritev2", "pwrite64", "pwritev")
"""A save must not return when one of these has failed for good."""


class Server:
    """Processes that save, forked from one that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def case(self, how: str) -> Case:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.number += 1
        folder = self.folder / str(self.number)
        (folder / "store").mkdir(parents=True)
        (folder / "notes").write_bytes(bytes(1 << 14))
        words = [folder / "run", folder / "store", folder / "notes", how, NBYTES[how]]
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return Case(folder, int(self.process.stdout.readline()), NBYTES[how])

    def end(self) -> None:
        """End the server and its children: one that a failed test has left would hold the server's output open."""
        children = Path("/proc", str(self.process.pid), "task", str(self.process.pid), "children").read_text().split()
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


class Case:
    """One process that saves three times, and its stops."""

    def __init__(self, folder: Path, pid: int, nbytes: int) -> None:
        self.folder, self.pid, self.nbytes = folder, pid, nbytes
        self.root = folder / "run"
        self.wait_for(lambda: self.state() == "T")

    def state(self) -> str:
        try:
            return Path("/proc", str(self.pid), "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "gone"

    def threads(self) -> int:
        """Return the number of threads that have not ended, at least one while the process is there."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def tracer(self) -> int:
        try:
            text = Path("/proc", str(self.pid), "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return int(text.partition("TracerPid:")[2].split()[0])

    def outcome(self) -> str:
        """Return how the newest save has ended: its number and what became of it."""
        return (self.folder / "notes").read_bytes().partition(b"\0")[0].decode(errors="replace")

    def allow(self, step: int) -> None:
        """Let the process save this step once it is continued."""
        with open(self.folder / "notes", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([step]))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"stands still in {self.folder}: {self.outcome()}, state {self.state()}"
            time.sleep(0.001)

    def second_save(self, *words: str) -> tuple[str, str]:
        """Save step 2 under strace with these options: how it ended ("gone" when the process did), and the trace."""
        trace = self.folder / "trace"
        tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", str(trace), *words, "-p", str(self.pid)])
        try:
            self.wait_for(lambda: self.tracer() == tracer.pid or tracer.poll() is not None)
            if tracer.poll() is not None:
                pytest.skip("strace may not attach to a process here")
            self.allow(2)
            os.kill(self.pid, signal.SIGCONT)
            self.wait_for(lambda: self.outcome().startswith("2") or self.state() in ("gone", "Z"))
        finally:
            if self.state() in ("gone", "Z"):
                tracer.kill()  # strace may wait for ever for threads that died with their process
            tracer.terminate()
            tracer.wait()
        text = trace.read_text(errors="replace")
        return (self.outcome()[2:] if self.outcome().startswith("2") else "gone"), text

    def third_save(self) -> str:
        """Save step 3 in the same process, undisturbed; how it ended."""
        self.wait_for(lambda: self.state() == "T")
        self.allow(3)

        def has_ended() -> bool:
            if self.outcome().startswith("3"):
                return True
            os.kill(self.pid, signal.SIGCONT)  # again and again: a stop may have been on its way
            return False

        self.wait_for(has_ended)
        os.kill(self.pid, signal.SIGKILL)
        return self.outcome()[2:]

    def opened(self) -> int:
        """The step that is opened, with the contents that it must have."""
        checkpoint = open_checkpoint(self.root)
        expected = content(checkpoint.step, self.nbytes)
        assert checkpoint.read("w", "param") == checkpoint.read("linked", "exp_avg") == expected
        assert verify(checkpoint.path).ok
        return checkpoint.step


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if shutil.which("strace") is None:
        pytest.skip("no strace here")
    server = Server(tmp_path)
    yield server
    server.end()


def calls(case: Case) -> dict[str, int]:
    """How often one thread of a save makes each system call."""
    outcome, trace = case.second_save()
    third = case.third_save()
    assert (outcome, third) == ("saved", "saved")
    found = collections.Counter(re.findall(r"^(\d+) +(\w+)\(", trace, re.MULTILINE))
    most: dict[str, int] = {}
    for (_, name), count in found.items():
        most[name] = max(most.get(name, 0), count)
    assert {"openat", "fsync", "rename"} <= most.keys(), trace
    return most


def fail_once(server: Server, how: str, call: str, error: str, when: int) -> str:
    """The call fails once, and the save is refused or good; "refused", "saved" or "not met"."""
    case = server.case(how)
    outcome, trace = case.second_save("-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={when}")
    injected = "(INJECTED)" in trace
    what = f"{how}: {call} number {when} answers {error}: {outcome}"
    assert outcome == "saved" or outcome.startswith("refused: "), what
    step = case.opened()
    assert step == 2 if outcome == "saved" else step in (1, 2), f"{what}; step {step} is opened"
    if injected and call in PROMISES and error != "EINTR":
        assert outcome != "saved", what
    third = case.third_save()
    assert third == "saved" and case.opened() == 3, f"{what}; the next save: {third}"
    left = [path.name for path in case.root.iterdir() if path.name.startswith(".")]
    assert not left, f"{what}; left {left}"
    shutil.rmtree(case.folder)
    return "not met" if not injected else outcome.partition(":")[0]


def kill_once(server: Server, how: str, call: str, when: int) -> str:
    """The process dies as it makes the call; what was there before loads, and another process continues."""
    case = server.case(how)
    outcome, _ = case.second_save("-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}")
    if outcome != "gone":
        with contextlib.suppress(ProcessLookupError):  # it died after the save, in the call that stops it
            os.kill(case.pid, signal.SIGKILL)
    case.wait_for(lambda: case.threads() <= 1)  # until the last one ends, it has the lock of what it saved
    step = check(case.root, case.nbytes, 2 if outcome == "saved" else 1)
    shutil.rmtree(case.folder)
    return f"killed, step {step}" if outcome == "gone" else "not met"


def test_calls_that_fail_and_kills_inside_of_calls_lose_nothing(server: Server) -> None:
    for call, error, when in (("fsync", "EIO", 1), ("fsync", "EIO", 4), ("rename", "EIO", 1), ("mkdir", "ENOSPC", 1)):
        assert fail_once(server, "now", call, error, when) == "refused"
    assert fail_once(server, "behind", "flock", "EIO", 1) == "refused"
    assert fail_once(server, "direct", "flock", "EIO", 5) == "refused"  # as the root is unlocked, the staging is not
    assert fail_once(server, "direct", "write", "EIO", 1) == "saved"  # which wakes the thread that writes
    assert kill_once(server, "now", "rename", 1) == "killed, step 1"
    assert kill_once(server, "behind", "rename", 2) == "killed, step 1"  # before `latest` got its name


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("how", NBYTES)
def test_every_call_of_a_save_fails_once_and_kills_once(server: Server, how: str) -> None:
    counts = calls(server.case(how))
    met: dict[str, collections.Counter[str]] = {"failures": collections.Counter(), "kills": collections.Counter()}
    for call, count in counts.items():
        for when in range(1, count + 1):
            for error in FAILURES.get(call, ()):
                met["failures"][fail_once(server, how, call, error, when)] += 1
            met["kills"][kill_once(server, how, call, when)] += 1
    print(f"saves {how}, calls {counts}: 0 lost, 0 wrong; { ({what: dict(found) for what, found in met.items()}) }")
