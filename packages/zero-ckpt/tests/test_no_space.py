"""A full disk is a typed error on every rank; training continues and earlier checkpoints stay."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import CheckpointError, Interval, convert, open_checkpoint, save_sharded, verify


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {mount.stderr.decode().strip()}")
    gc.collect()
    gc.disable()  # no file may wait for it to be closed
    try:
        yield tmp_path
        subprocess.run(["umount", str(tmp_path)], check=True)
    finally:
        gc.enable()


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


@pytest.mark.parametrize("to", ["safetensors", "pytorch", "deepspeed-universal", "zero-ckpt"])
def test_a_full_disk_fails_a_conversion_which_leaves_nothing(
    small_disk: Path, tmp_path_factory: pytest.TempPathFactory, to: str
) -> None:
    pytest.importorskip("torch")
    source = tmp_path_factory.mktemp("source")
    data = bytes(4 * 4096)
    made = [Interval("w", kind, (4096,), "F32", 0, data) for kind in ("param", "exp_avg", "exp_avg_sq")]
    save_sharded(source, "t", made, step=1)
    for pages in range(0, 45, 3):
        room = small_disk / "fill"
        with room.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8 << 20)
            os.truncate(room, (8 << 20) - pages * os.sysconf("SC_PAGE_SIZE"))
        try:
            convert(source, small_disk / "out", to=to)
        except CheckpointError as error:
            assert "no space" in str(error).lower()
        except OSError as error:
            assert "No space" in str(error) and str(small_disk) in str(error)
        else:
            assert pages > 3
            break
        if (small_disk / "out" / "step1").is_dir():  # only `latest` had no room
            assert verify(small_disk / "out" / "step1").ok
            break
        names = [path.name for path in small_disk.rglob("*") if path.is_file() and path != room]
        assert names in ([], ["zero_to_fp32.py"])
        room.unlink()
    else:
        raise AssertionError("the conversion never had room")
