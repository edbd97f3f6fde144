"""A disk that answers EIO: verify reports it, and opening continues to the newest checkpoint that can be read."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zero_ckpt import FileExtent, Interval, save_sharded, verify

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
    return run_under(*words, code=READER, root=root)


def run_under(*words: str, code: str, root: Path) -> tuple[str, str]:
    """Run code with the argument `root` under strace with these options: what it printed, and the trace."""
    trace = root.parent / "trace"
    command = ["strace", "-f", "-qq", "-o", str(trace), *words, sys.executable, "-c", code, str(root)]
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


def test_a_slice_is_restored_from_another_twin_where_the_first_cannot_be_read(root: Path) -> None:
    saved, sealed = root.parent / "three", root.parent / "sealed"
    sealed.write_bytes(b"unchanged")
    for step, data in enumerate((b"unchanged", FileExtent(sealed, 0, 9), b"unchanged"), 1):
        save_sharded(saved, f"s{step}", [Interval("w", "param", (9,), "U8", 0, data)], step=step)
    damaged, unreadable = saved / "s1" / "rank-00000.safetensors", saved / "s2" / "rank-00000-0000.extents"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    code = "import sys; from zero_ckpt.repairing import repair; print(*repair(sys.argv[1]), sep='\\n')"
    words = ["-P", str(unreadable), *only("preadv,preadv2", "EIO")]
    said, trace = run_under(*words, code=code, root=saved)
    assert "(INJECTED)" in trace
    assert said.splitlines()[0] == "restored damaged slices of s1 from other checkpoints"
    assert "set s2 aside" in said and "set s1 aside" not in said and verify(saved / "s1").ok


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
