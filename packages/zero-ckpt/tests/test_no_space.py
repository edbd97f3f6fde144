"""A full disk is a typed error on every rank; training continues and earlier checkpoints stay."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import CheckpointError, Interval, open_checkpoint, save_sharded


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {mount.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def save(group: ThreadCoordinator, root: Path, step: int, nbytes: int) -> Path:
    part = nbytes // group.world_size
    data = bytes([step]) * part
    mine = Interval("w", "param", (part * group.world_size,), "U8", part * group.rank, data)
    return save_sharded(root, f"s{step}", [mine], step=step, coordinator=group)


def test_a_full_disk_fails_the_save_on_every_rank_and_nothing_else(small_disk: Path) -> None:
    root = small_disk / "ckpt"
    on_ranks(2, lambda group: save(group, root, 1, 3 << 20))
    for error in on_ranks(2, lambda group: save(group, root, 2, 9 << 20)):
        assert isinstance(error, CheckpointError) and error.causes
        assert all("no space" in cause.lower() and "rank-0000" in cause for cause in error.causes.values())
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["s1"]
    assert open_checkpoint(root).read("w", "param") == b"\1" * (3 << 20)
    assert on_ranks(2, lambda group: save(group, root, 3, 1 << 20)) == [root / "s3"] * 2
