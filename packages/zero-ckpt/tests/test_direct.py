"""With the `nvme` extra the bytes go past the page cache, and everything else stays as it is."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("zero_nvme_aio", reason="the nvme extra is not installed")

from zero_ckpt import CheckpointError, DamagedError, Interval, ReadRequest, open_checkpoint, save_sharded, verify
from zero_ckpt.direct import DirectSink, default_copy, default_sink, has_direct_reads
from zero_ckpt.snapshot import Copy, move_memory
from zero_ckpt.writer import BufferedSink


def intervals(rng: random.Random) -> list[Interval]:
    """Many small and a few large pieces of odd sizes, at odd addresses."""
    sizes = [1, 3, 4095, 4096, 4097, *rng.choices(range(1, 70_000), k=40), 20_000_001, 9 << 20]
    blocks = [memoryview(rng.randbytes(size + 7))[7:] for size in sizes]
    return [Interval(f"w{n}", "param", (len(data),), "U8", 0, data) for n, data in enumerate(blocks)]


def test_direct_and_ordinary_files_are_the_same(tmp_path: Path, rng: random.Random) -> None:
    contents = intervals(rng)
    assert default_sink() is DirectSink
    direct = save_sharded(tmp_path / "direct", "t", contents, step=1, open_sink=DirectSink)
    plain = save_sharded(tmp_path / "plain", "t", contents, step=1, open_sink=BufferedSink)
    for name in ("rank-00000.safetensors", "manifest.msgpack"):
        assert (direct / name).read_bytes() == (plain / name).read_bytes()
    assert verify(direct).ok


@pytest.mark.parametrize("copy", [move_memory, default_copy()])
def test_copies_for_a_background_save_are_exact(copy: Copy, rng: random.Random) -> None:
    import zero_nvme_aio

    assert default_copy() is zero_nvme_aio.copy_memories
    for content in intervals(rng):
        source = memoryview(content.data)  # type: ignore[arg-type]
        target = bytearray(source.nbytes + 14)
        copy([memoryview(target)[7 : 7 + source.nbytes]], [source])
        assert target == bytes(7) + source + bytes(7)
        copy([memoryview(target)[: source.nbytes]], [memoryview(bytearray(source))])
        assert target[: source.nbytes] == source


def test_one_staging_buffer_may_be_reused_while_requests_are_in_flight(tmp_path: Path) -> None:
    staging = bytearray(1 << 20)

    def stage(value: int) -> bytearray:
        staging[:] = bytes([value]) * len(staging)
        return staging

    lazy = [Interval(f"w{i}", "param", (1 << 20,), "U8", 0, lambda i=i: stage(i), 1 << 20) for i in range(64)]
    save_sharded(tmp_path, "t", lazy, step=0, open_sink=DirectSink)
    checkpoint = open_checkpoint(tmp_path)
    assert all(checkpoint.read(f"w{i}", "param", 0, 1) == bytes([i]) for i in range(64))


def test_a_full_disk_is_the_same_typed_error(tmp_path: Path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {mount.stderr.decode().strip()}")
    try:
        big = Interval("w", "param", (20 << 20,), "U8", 0, bytes(20 << 20))
        with pytest.raises(CheckpointError, match="(?i)no space"):
            save_sharded(tmp_path, "t", [big], step=0, open_sink=DirectSink)
        assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_large_reads_go_past_the_page_cache_and_are_verified(tmp_path: Path, rng: random.Random) -> None:
    raw = rng.randbytes(70 << 20)
    path = save_sharded(tmp_path, "t", [Interval("w", "param", (len(raw),), "U8", 0, raw)], step=0)
    assert has_direct_reads(len(raw))
    out = bytearray(len(raw) - 2)
    open_checkpoint(tmp_path).read_many([ReadRequest("w", "param", 1, out)])
    assert out == raw[1:-1]
    file = path / "rank-00000.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size - (20 << 20))
        byte = handle.read(1)
        handle.seek(-1, 1)
        handle.write(bytes([byte[0] ^ 4]))
    with pytest.raises(DamagedError, match=r"'w' \(param\) in .*rank-00000.safetensors: elements .* are damaged"):
        open_checkpoint(tmp_path).read_many([ReadRequest("w", "param", 0, bytearray(len(raw)))])
