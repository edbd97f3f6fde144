"""A disk that answers EIO: verify reports it, and opening goes on to the newest checkpoint that can be read."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zero_ckpt import Interval, save_sharded

READER = """
import sys
import zero_ckpt
root = sys.argv[1]
print("verified", [str(problem) for problem in zero_ckpt.verify(root + "/s2").problems])
try:
    opened = zero_ckpt.open_checkpoint(root)
    data = {step: (f"step {step}" * 999).encode() for step in (1, 2)}
    assert opened.read("w", "param") == data[opened.step]
    print("opened", opened.step)
except zero_ckpt.CheckpointError as error:
    print("refused", error)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    if shutil.which("strace") is None:
        pytest.skip("no strace here")
    for step in (1, 2):
        data = (f"step {step}" * 999).encode()
        save_sharded(tmp_path / "run", f"s{step}", [Interval("w", "param", (len(data),), "U8", 0, data)], step=step)
    return tmp_path / "run"


def read_under(*words: str, root: Path) -> tuple[str, str]:
    """Run `READER` under strace with these options: what it printed, and the trace."""
    trace = root.parent / "trace"
    command = ["strace", "-f", "-qq", "-o", str(trace), *words, sys.executable, "-c", READER, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, trace.read_text(errors="replace")


def only(calls: str, error: str) -> list[str]:
    """Return strace's options to stop at these calls alone, and have them fail."""
    return ["--seccomp-bpf", "-e", f"trace={calls}", "-e", f"inject={calls}:error={error}"]


@pytest.mark.parametrize(
    ("path", "call", "step"),
    [("s2/manifest.msgpack", "read", 1), ("s2/manifest.msgpack", "fstat", 1), ("latest", "read", 2)],
)
def test_a_file_that_cannot_be_read_is_a_problem_of_its_checkpoint(root: Path, path: str, call: str, step: int) -> None:
    calls = {"fstat": "fstat,newfstatat"}.get(call, call)
    said, trace = read_under("-P", str(root / path), *only(calls, "EIO"), root=root)
    assert "(INJECTED)" in trace
    assert said.endswith(f"opened {step}\n"), said
    assert ("Input/output error" in said.splitlines()[0]) == path.startswith("s2"), said


def test_a_folder_that_may_not_be_listed_keeps_no_checkpoint_from_being_opened(root: Path) -> None:
    (root / "lost+found").mkdir()
    (root / "latest").unlink()
    said, trace = read_under("-P", str(root / "lost+found"), *only("openat", "EACCES"), root=root)
    assert "(INJECTED)" in trace and said.endswith("opened 2\n"), said


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_call_of_reading_fails_once(root: Path) -> None:
    paths = [root, *root.rglob("*")]
    below = [word for path in paths for word in ("-P", str(path))]
    _, trace = read_under(*below, root=root)
    counts = collections.Counter(re.findall(r"^\d+ +(\w+)\(", trace, re.MULTILINE))
    met: collections.Counter[str] = collections.Counter()
    for call, count in counts.items():
        for when in range(1, count + 1):
            said, trace = read_under(*below, "-e", f"inject={call}:error=EIO:when={when}", root=root)
            first, second = said.splitlines()[:2]
            assert first.startswith("verified") and second.startswith(("opened", "refused")), (call, when, said)
            met[f"{second.split()[0]} {second.split()[1] if 'opened' in second else ''}"] += "(INJECTED)" in trace
    print(f"calls {dict(counts)}: 0 bare errors; {dict(met)}")
