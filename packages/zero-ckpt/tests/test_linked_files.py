"""A sealed file becomes part of a checkpoint by a link; where it cannot, its bytes are copied and compared."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import (
    AsyncSaver,
    CheckpointError,
    DamagedError,
    FileExtent,
    Interval,
    convert,
    filing,
    inspect,
    open_checkpoint,
    save_sharded,
    verify,
)
from zero_ckpt.comparing import diff
from zero_ckpt.direct import DirectSink
from zero_ckpt.plan import MAX_SLICE_BYTES
from zero_ckpt.repairing import repair
from zero_ckpt.writer import BufferedSink, OpenSink

PAGE = 4096


def digest(data: bytes) -> str:
    return "xxh3_64:" + xxhash.xxh3_64_hexdigest(data)


def sealed(path: Path, parts: dict[str, bytes], *, hashed: bool = True) -> list[Interval]:
    """A read-only file that holds tensors of bytes at page boundaries, and their intervals."""
    path.parent.mkdir(parents=True, exist_ok=True)
    intervals = []
    with path.open("wb") as file:
        for name, data in parts.items():
            begin = -(-file.tell() // PAGE) * PAGE
            file.seek(begin)
            file.write(data)
            extent = FileExtent(path, begin, len(data), digest(data) if hashed else None)
            intervals.append(Interval(name, "exp_avg", (len(data),), "U8", 0, extent))
    path.chmod(0o444)
    return intervals


@pytest.fixture
def tensors(rng: random.Random) -> dict[str, bytes]:
    return {"large": rng.randbytes(2 * MAX_SLICE_BYTES + 4711), "small": rng.randbytes(100), "b": rng.randbytes(PAGE)}


@pytest.fixture
def no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is on another file system."""

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(filing.os, "link", link)
    monkeypatch.setattr(filing, "_CLONE", 0)


@pytest.mark.parametrize("hashed", [True, False])
def test_a_linked_file_costs_no_bytes_and_reads_like_any_other(
    tmp_path: Path, tensors: dict[str, bytes], hashed: bool
) -> None:
    store = tmp_path / "store" / "g1.extents"
    plain = Interval("p", "param", (4,), "U8", 0, b"abcd")
    path = save_sharded(tmp_path / "run", "t", [*sealed(store, tensors, hashed=hashed), plain], step=1)
    linked = path / "rank-00000-0000.extents"
    assert linked.samefile(store) and (path / "rank-00000.safetensors").stat().st_size < 3 * PAGE
    shutil.rmtree(store.parent)
    checkpoint = open_checkpoint(tmp_path / "run")
    for name, data in tensors.items():
        assert checkpoint.read(name, "exp_avg") == data
        for begin, length in ((0, 1), (len(data) // 3, 50), (len(data) - 1, 1)):
            assert checkpoint.read(name, "exp_avg", begin, length) == data[begin : begin + length]
    assert checkpoint.read("p", "param") == b"abcd"
    assert verify(path).ok and diff(checkpoint, open_checkpoint(tmp_path / "run")).same
    assert {item["name"] for item in inspect(path)["tensors"]} == {*tensors, "p"}
    slices = len(checkpoint.entry("large", "exp_avg").slices)
    assert slices == (1 if hashed else 3)


def test_conversion_reads_linked_files(tmp_path: Path, tensors: dict[str, bytes]) -> None:
    intervals = [replace(interval, kind="param") for interval in sealed(tmp_path / "g1.extents", tensors)]
    save_sharded(tmp_path / "run", "t", intervals, step=1)
    copy = convert(tmp_path / "run", tmp_path / "copy", to="zero-ckpt")[0]
    for name, data in tensors.items():
        assert open_checkpoint(copy).read(name, "param") == data
    safetensors = pytest.importorskip("safetensors.numpy")
    convert(tmp_path / "run", tmp_path / "out.safetensors")
    assert {name: data.tobytes() for name, data in safetensors.load_file(tmp_path / "out.safetensors").items()} == (
        tensors
    )


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_the_progress_bar_ends_at_its_total(
    tmp_path: Path, command: str, read_terminal: Callable[[int], bytes]
) -> None:
    extents = sealed(tmp_path / "g1.extents", {"v": bytes(3_000_000)})
    plain = Interval("p", "param", (1_000_000,), "U8", 0, bytes(1_000_000))
    save_sharded(tmp_path / "run", "t", [*extents, plain], step=1)
    terminal, stderr = os.openpty()
    program = [sys.executable, "-m", "zero_ckpt", command, str(tmp_path / "run")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(program, stderr=stderr, stdout=subprocess.DEVNULL, env=environment)
    os.close(stderr)
    shown = read_terminal(terminal)
    counts = re.findall(rb"([\d.,]+)/([\d.,]+) MB", re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", shown))
    assert done.returncode == 0 and counts[-1] == (b"4.0", b"4.0"), shown


@pytest.mark.usefixtures("no_link")
@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("sink", [BufferedSink, DirectSink])
def test_on_another_file_system_the_bytes_are_copied(
    tmp_path: Path, tensors: dict[str, bytes], hashed: bool, sink: OpenSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sink is DirectSink:
        pytest.importorskip("zero_nvme_aio")
    monkeypatch.setattr("zero_ckpt.linking.has_direct", lambda: sink is DirectSink)
    intervals = sealed(tmp_path / "g1.extents", tensors, hashed=hashed)
    wide = Interval("w", "param", (2,), "F64", 0, b"0123456789abcdef")
    path = save_sharded(tmp_path / "run", "t", [*intervals, wide], step=1, open_sink=sink)
    assert [file.name for file in path.glob("rank-*")] == ["rank-00000.safetensors"]
    checkpoint = open_checkpoint(path)
    assert {name: bytes(checkpoint.read(name, "exp_avg")) for name in tensors} == tensors
    assert checkpoint.read("w", "param") == b"0123456789abcdef" and verify(path).ok


@pytest.mark.usefixtures("no_link")
def test_what_is_copied_is_compared_with_what_the_file_should_hold(tmp_path: Path, tensors: dict[str, bytes]) -> None:
    store = tmp_path / "g1.extents"
    intervals = sealed(store, tensors)
    flip(store, MAX_SLICE_BYTES)
    with pytest.raises(DamagedError, match=r"'large' \(exp_avg\) in .*g1.extents: the extent at byte 0 is damaged"):
        save_sharded(tmp_path / "run", "t", intervals, step=1)
    assert not [entry for entry in (tmp_path / "run").iterdir() if entry.is_dir()]


def flip(path: Path, position: int) -> None:
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(mode)


def test_a_flipped_byte_anywhere_in_a_linked_file_is_found(tmp_path: Path) -> None:
    intervals = sealed(tmp_path / "g1.extents", {"v": b"v" * 50, "w": b"w" * 70})
    path = save_sharded(tmp_path / "run", "t", intervals, step=1)
    linked = path / "rank-00000-0000.extents"
    for position in [*range(60), 4095, *range(PAGE, PAGE + 70)]:
        flip(linked, position)
        (problem,) = verify(path).problems
        name = "v (exp_avg)" if position < 50 else "w (exp_avg)" if position >= PAGE else ""
        assert (problem.file, problem.tensor) == (linked, name)
        if name:
            with pytest.raises(DamagedError, match=rf"'{name[0]}' \(exp_avg\) in .*rank-00000-0000.extents"):
                open_checkpoint(path).read(name[0], "exp_avg", 7, 3)
        flip(linked, position)
    assert verify(path).ok


def test_ranks_link_their_own_files_and_what_is_also_in_memory_is_not_written(
    tmp_path: Path, rng: random.Random
) -> None:
    raw = rng.randbytes(3 * MAX_SLICE_BYTES)

    def part(group: ThreadCoordinator) -> Path:
        if group.rank == 1:
            extents = sealed(tmp_path / "store" / "g.extents", {"w": raw})
        else:
            extents = [Interval("w", "exp_avg", (len(raw),), "U8", 0, raw)]
        return save_sharded(tmp_path / "run", "t", extents, step=1, coordinator=group)

    assert on_ranks(3, part) == [tmp_path / "run" / "t"] * 3
    assert [file.name for file in (tmp_path / "run" / "t").glob("rank-*")] == ["rank-00001-0000.extents"]
    assert open_checkpoint(tmp_path / "run").read("w", "exp_avg") == raw


def test_a_part_of_an_extent_gets_checksums_of_its_own(tmp_path: Path, rng: random.Random) -> None:
    raw = rng.randbytes(MAX_SLICE_BYTES + 999)

    def part(group: ThreadCoordinator) -> Path:
        if group.rank == 0:  # the extent holds more than the tensor: rank 1 has the end of it, in a file of its own
            extent = sealed(tmp_path / "a.extents", {"w": raw})[0].data
        else:
            extent = sealed(tmp_path / "b.extents", {"w": raw[1000:]})[0].data
        interval = Interval("w", "exp_avg", (len(raw),), "U8", 1000 * group.rank, extent)
        return save_sharded(tmp_path / "run", "t", [interval], step=1, coordinator=group)

    on_ranks(2, part)
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.read("w", "exp_avg") == raw and verify(checkpoint.path).ok
    assert checkpoint.entry("w", "exp_avg").slices[0].length == 1000


def test_nodes_that_hold_the_same_elements_each_in_their_own_way(tmp_path: Path, rng: random.Random) -> None:
    raw = rng.randbytes(2 * MAX_SLICE_BYTES + 3)

    def part(group: ThreadCoordinator) -> Path:
        linked = sealed(tmp_path / "store" / "g.extents", {"w": raw})
        own = linked if group.rank == 0 else [Interval("w", "exp_avg", (len(raw),), "U8", 0, raw)]
        root = tmp_path / f"node{group.rank}"
        return save_sharded(root, "t", own, step=1, coordinator=group, node=str(group.rank))

    on_ranks(2, part)
    for node in (0, 1):
        path = tmp_path / f"node{node}" / "t"
        assert open_checkpoint(path).read("w", "exp_avg") == raw and verify(path).ok
    shutil.copy(tmp_path / "node0" / "t" / "rank-00000-0000.extents", tmp_path / "node1" / "t")
    assert verify(tmp_path / "node1" / "t").ok and not verify(tmp_path / "node1" / "t").absent


def spoil(**changes: object) -> Callable[[Interval], Interval]:
    return lambda interval: replace(interval, data=replace(interval.data, **changes))  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (spoil(file_offset_bytes=PAGE * 2), r"'w' \(exp_avg\) in .*: bytes 8192 to 8202 are outside of the file"),
        (spoil(file_offset_bytes=0), r"'w' \(exp_avg\) in .*: byte 0 is given to 'v' \(exp_avg\) in .* as well"),
        (spoil(file_offset_bytes=-1), "is no extent; expected sizes that are not negative"),
        (spoil(checksum="crc32c:0"), "is no extent; .* and a checksum such as"),
        (spoil(path="gone.extents"), "gone.extents"),
        (lambda interval: replace(interval, dtype="F32"), "data of 10 bytes is not whole F32 elements"),
    ],
)
def test_extents_that_cannot_be_are_refused_by_name(
    tmp_path: Path, spoiled: Callable[[Interval], Interval], message: str
) -> None:
    first, second = sealed(tmp_path / "g.extents", {"v": b"v" * 10, "w": b"w" * 10})
    with pytest.raises(CheckpointError, match=message):
        save_sharded(tmp_path / "run", "t", [first, spoiled(second)], step=1)
    assert not (tmp_path / "run" / "t").exists() and not list((tmp_path / "run").glob(".saving*"))


def test_a_background_save_keeps_the_owner_of_a_file_until_it_is_linked(tmp_path: Path) -> None:
    class Generation:
        def __init__(self, path: Path) -> None:
            self.path = path

        def __del__(self) -> None:
            self.path.unlink()

    intervals = sealed(tmp_path / "g.extents", {"w": b"w" * 10})
    owner = Generation(tmp_path / "g.extents")
    owned = [replace(interval, data=replace(interval.data, owner=owner)) for interval in intervals]  # type: ignore[type-var]
    del owner
    with AsyncSaver() as saver:
        saver.save(tmp_path / "run", "t", owned, step=1)
        del owned
    assert not (tmp_path / "g.extents").exists()
    assert open_checkpoint(tmp_path / "run").read("w", "exp_avg") == b"w" * 10


def test_repair_restores_a_linked_file_from_a_copy_that_is_not_the_same_file(tmp_path: Path) -> None:
    root = tmp_path / "run"
    intervals = sealed(tmp_path / "g.extents", {"w": b"w" * 1000})
    for step in (1, 2):
        save_sharded(root, f"s{step}", intervals, step=step)
    save_sharded(root, "s3", [Interval("w", "exp_avg", (1000,), "U8", 0, b"w" * 1000)], step=3)
    flip(root / "s1" / "rank-00000-0000.extents", 500)
    assert not verify(root / "s2").ok
    damaged = (tmp_path / "g.extents").read_bytes()
    assert repair(root) == [f"restored damaged slices of s{step} from other checkpoints" for step in (1, 2)]
    assert all(verify(root / f"s{step}").ok for step in (1, 2, 3))
    assert (tmp_path / "g.extents").read_bytes() == damaged  # not below the root, so not written
    for step in (1, 2):
        names = sorted(path.name for path in (root / f"s{step}").iterdir())
        assert names == ["manifest.msgpack", "rank-00000-0000.extents"]
        assert (root / f"s{step}" / names[1]).stat().st_mode == (tmp_path / "g.extents").stat().st_mode


@pytest.fixture
def cloning_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system whose files can share blocks."""
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("mkfs.xfs (xfsprogs) is not installed")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_where_links_are_refused_blocks_are_shared(cloning_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    store = cloning_disk / "g.extents"
    intervals = sealed(store, {"w": b"w" * (5 << 20)})
    before = shutil.disk_usage(cloning_disk).free
    monkeypatch.setattr(filing.os, "link", link)
    path = save_sharded(cloning_disk / "run", "t", intervals, step=1)
    cloned = path / "rank-00000-0000.extents"
    assert not cloned.samefile(store) and before - shutil.disk_usage(cloning_disk).free < 1 << 20
    assert open_checkpoint(path).read("w", "exp_avg") == b"w" * (5 << 20) and verify(path).ok


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="/dev/shm is not writable")
def test_a_store_on_another_file_system_in_earnest(tmp_path: Path, tensors: dict[str, bytes]) -> None:
    shared = Path("/dev/shm") / f"zero-ckpt-{os.getpid()}"
    if Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("the temporary directory is on /dev/shm")
    try:
        save_sharded(tmp_path / "run", "t", sealed(shared / "g.extents", tensors), step=1)
    finally:
        shutil.rmtree(shared)
    checkpoint = open_checkpoint(tmp_path / "run")
    assert {name: bytes(checkpoint.read(name, "exp_avg")) for name in tensors} == tensors


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_five_thousand_linked_files_are_saved_and_read(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(5000)]
    intervals = [interval for name in names for interval in sealed(tmp_path / "store" / name, {name: name.encode()})]
    os.sync()
    spent = {}
    for what in ("saved", "opened and read", "verified"):
        wall, processor = time.monotonic(), time.process_time()
        if what == "saved":
            path = save_sharded(tmp_path / "run", "t", intervals, step=1)
        elif what == "verified":
            assert verify(path).ok
        else:
            checkpoint = open_checkpoint(path)
            assert all(checkpoint.read(name, "exp_avg") == name.encode() for name in names)
        spent[what] = f"{time.monotonic() - wall:.1f} s, {time.process_time() - processor:.1f} s of processor"
    print(f"5,000 linked files: {spent}")
