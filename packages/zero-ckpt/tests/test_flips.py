"""A bit that flips anywhere in a root is harmless, or it is told: what is read is never wrong in silence."""

from __future__ import annotations

import collections
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import AsyncSaver, Checkpoint, CheckpointError, FileExtent, Interval, restore, save_sharded
from zero_ckpt.checksum import checksum
from zero_ckpt.cli import main
from zero_ckpt.repairing import repair

NBYTES = 9000
STEPS = (1, 2, 3, 4)


def content(name: str, step: int) -> bytes:
    """Return the values of a tensor at a step; `linked` is written again at every second step only."""
    changed = step if name == "w" else (step + 1) // 2
    return random.Random(f"{name} {changed}").randbytes(NBYTES)


def save_all(root: Path, store: Path) -> None:
    """Four steps by three ranks, saved at once or behind, of which two and two link the same sealed files."""
    store.mkdir()

    def part(group: ThreadCoordinator) -> None:
        begin, end = (NBYTES * number // 3 for number in (group.rank, group.rank + 1))
        behind = AsyncSaver(group)
        for step in STEPS:
            sealed = store / f"{group.rank}-{(step + 1) // 2}"
            data = content("linked", step)[begin:end]
            if not sealed.exists():
                sealed.write_bytes(data)
            extent = FileExtent(sealed, 0, len(data), checksum(data))
            mine = [
                Interval("w", "param", (NBYTES,), "U8", begin, bytearray(content("w", step)[begin:end])),
                Interval("linked", "exp_avg", (NBYTES,), "U8", begin, extent),
            ]
            if step % 2:
                save_sharded(root, f"s{step}", mine, step=step, coordinator=group)
            else:
                behind.save(root, f"s{step}", mine, step=step)
                behind.wait()
        behind.close()

    assert on_ranks(3, part) == [None] * 3


def read_all(checkpoint: Checkpoint) -> None:
    step = checkpoint.step
    for name, kind in (("w", "param"), ("linked", "exp_avg")):
        assert checkpoint.read(name, kind) == content(name, step), f"{name} of step {step} is wrong in silence"


def look(root: Path) -> str:
    """Return what a job that resumes meets."""
    try:
        checkpoint, _ = restore(root, read_all)
    except CheckpointError:
        return "refused"
    if checkpoint.report.skipped:
        return f"step {checkpoint.step}, told"
    assert checkpoint.step == STEPS[-1], "an older step is opened in silence"
    return "the newest"


def flip(path: Path, rng: random.Random) -> int:
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    raw[at] ^= 1 << rng.randrange(8)
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:  # in place, so that what is linked elsewhere changes too
        file.write(raw)
    path.chmod(mode)
    return at


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.soak)])
def test_no_flipped_bit_is_read_in_silence(tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng, found = random.Random(count), collections.Counter[str]()
    save_all(tmp_path / "good", tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    for number in range(count):
        root = tmp_path / str(number)
        subprocess.run(["cp", "-a", str(tmp_path / "good"), str(root)], check=True)  # with its hard links
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        path = rng.choice(files)
        at = flip(path, rng)
        met = look(root)
        found[met] += 1
        status = main(["verify", str(root)])
        if path.name == "zero_to_fp32.py" or path.parent == root:
            continue
        assert status == 1, f"bit of byte {at} of {path} flipped, and verify finds nothing"
        repair(root)
        found[f"step {restore(root, read_all)[0].step} after repair"] += 1
        assert main(["verify", str(root)]) == 0
        shutil.rmtree(root)
    capsys.readouterr()
    with capsys.disabled():
        print(f"{count} flips: 0 wrong in silence: {dict(sorted(found.items()))}")
