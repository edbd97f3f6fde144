"""Seam 2: named extents, generations, checksums, and what survives a kill."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from zero_nvme_aio import AlignedBuffer, Engine, Extent, ExtentStore, errors
from zero_nvme_aio.extents import _store
from zero_nvme_aio.testing import Delay, Fail, faulty_engine

KIB = 1024


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def get(store: ExtentStore, name: str, nbytes: int, offset: int = 0, **options: bool) -> bytes:
    out = bytearray(nbytes)
    assert store.read(name, out, offset, **options).wait() == nbytes
    return bytes(out)


def check_on_disk(extent: Extent, expected: bytes) -> None:
    with open(extent.path, "rb") as file:
        file.seek(extent.file_offset_bytes)
        data = file.read(extent.nbytes)
    assert data == expected
    assert extent.checksum == f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}"


@pytest.fixture(params=[1, 3])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return [tmp_path / f"device{i}" for i in range(request.param)]


def test_what_was_written_is_read_from_the_newest_generation(paths: list[Path]) -> None:
    with ExtentStore(paths, stripe_bytes=64 * KIB) as store:
        a, b = random_bytes(300 * KIB + 5, 1), random_bytes(10, 2)
        store.write("a", a)
        store.write("b", b)
        assert get(store, "a", len(a)) == a
        first = store.seal()
        newer = random_bytes(100 * KIB, 3)
        store.write("a", newer, 50 * KIB)
        expected = a[: 50 * KIB] + newer + a[150 * KIB :]
        assert get(store, "a", len(a)) == expected
        assert get(store, "b", 10) == b
        second = store.seal()
        assert get(store, "a", len(a), verify=True) == expected
        assert store.bytes_written() == len(a) + len(b) + len(newer)
    assert (first.index, second.index) == (1, 2)
    assert set(first.extents) == {"a", "b"}
    assert set(second.extents) == {"a"}


def test_a_sealed_generation_lists_every_byte_with_its_checksum(paths: list[Path]) -> None:
    data = random_bytes(500 * KIB, 4)
    with ExtentStore(paths, stripe_bytes=64 * KIB) as store:
        for begin in range(0, len(data), 100 * KIB):
            store.write("x", data[begin : begin + 100 * KIB], begin)
        generation = store.seal()
        position = 0
        for extent in generation.extents["x"]:
            assert extent.offset_bytes == position
            check_on_disk(extent, data[position : position + extent.nbytes])
            position += extent.nbytes
        assert position == len(data)
        assert {extent.path for extent in generation.extents["x"]} == set(generation.files)
        assert len(generation.files) == len(paths)


def test_a_sealed_generation_is_never_written_again(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        store.write("x", random_bytes(100 * KIB))
        generation = store.seal()
        link = tmp_path / "linked"
        os.link(generation.files[0], link)
        before = link.read_bytes()
        assert stat.S_IMODE(os.stat(link).st_mode) == 0o444
        for seed in range(5):
            store.write("x", random_bytes(100 * KIB, seed + 10))
        store.seal()
        store.write("x", random_bytes(100 * KIB, 20))
    assert link.read_bytes() == before


def test_random_overlapping_writes_reads_and_seals_follow_a_plain_array(paths: list[Path]) -> None:
    generator = random.Random(5)
    with ExtentStore(paths, stripe_bytes=16 * KIB, verify=True) as store:
        size = 200 * KIB
        store.declare("n", size)
        mirror = bytearray(size)
        store.write("n", bytes(size))
        generations = []
        for step in range(150):
            begin = generator.randrange(size)
            end = min(size, begin + generator.choice([1, 100, 4096, 20_000, 70_000]))
            if generator.random() < 0.5:
                data = generator.randbytes(end - begin)
                store.write("n", data, begin)
                mirror[begin:end] = data
            else:
                assert get(store, "n", end - begin, begin) == mirror[begin:end], step
            if step % 25 == 24:
                generations.append((store.seal(), bytes(mirror)))
        assert get(store, "n", size) == mirror
        for extent in generations[-1][0].extents["n"]:
            check_on_disk(extent, generations[-1][1][extent.offset_bytes : extent.offset_bytes + extent.nbytes])


def test_declared_extents_make_a_safetensors_file(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        arrays = {"w": np.arange(70_000, dtype=np.float32), "m": np.arange(333, dtype=np.float16)}
        for name, array in arrays.items():
            store.declare(name, array.nbytes, {"float32": "F32", "float16": "F16"}[array.dtype.name])
        store.declare("never written", 4096)
        store.write("w", arrays["w"][:50_000])
        store.write("m", arrays["m"])
        store.write("w", arrays["w"][50_000:], 200_000)
        generation = store.seal()
        assert generation.kind == "safetensors"
        found = load_file(generation.files[0])
        for name, extents in generation.extents.items():
            joined = np.concatenate([found[extent.key] for extent in extents])
            np.testing.assert_array_equal(joined, arrays[name])
        assert all(key.split("@")[0] in arrays or key.startswith("__gap__") for key in found)


def test_without_checksums_at_write_time_the_seal_computes_them(paths: list[Path]) -> None:
    data = random_bytes(300 * KIB, 6)
    with ExtentStore(paths, stripe_bytes=64 * KIB, checksums=False) as store:
        store.write("x", data).wait()
        assert all(extent.checksum == "" for extent in store.extents()["x"])
        for extent in store.seal().extents["x"]:
            check_on_disk(extent, data[extent.offset_bytes : extent.offset_bytes + extent.nbytes])
        assert get(store, "x", len(data), verify=True) == data


def test_undeclared_extents_make_the_raw_kind(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        store.declare("a", 10)
        store.write("a", bytes(10))
        store.write("b", bytes(10))
        generation = store.seal()
        assert generation.kind == "raw"
        assert generation.extents["a"][0].key == ""


def test_a_changed_byte_on_disk_is_found_by_verify_and_named(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        store.write("x", bytes(100 * KIB))
        extent = store.seal().extents["x"][0]
        os.chmod(extent.path, 0o644)
        with open(extent.path, "r+b") as file:
            file.seek(extent.file_offset_bytes + 7777)
            file.write(b"\x01")
        get(store, "x", 100 * KIB)
        for offset, nbytes in [(0, 100 * KIB), (5, 10)]:
            with pytest.raises(errors.ChecksumError, match="'x' bytes 0 to 102400") as caught:
                get(store, "x", nbytes, offset, verify=True)
        assert (caught.value.path, caught.value.expected) == (extent.path, extent.checksum)


def test_never_written_bytes_and_wrong_sizes_are_refused_by_name(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        store.declare("d", 100, "F32")
        store.write("x", bytes(10), 20)
        for action, words in [
            (lambda: store.read("y", bytearray(1)), "'y' was never written"),
            (lambda: store.read("x", bytearray(30)), "bytes 0 to 20 of 'x' were never written"),
            (lambda: store.read("x", bytearray(11), 20), "bytes 30 to 31 of 'x'"),
            (lambda: store.write("d", bytes(101)), "outside of 'd', which has 100 bytes"),
            (lambda: store.write("d", bytes(1), -1), "outside of 'd'"),
            (lambda: store.declare("d", 101), "whole elements|declared with"),
            (lambda: store.declare("e", 3, "F32"), "whole elements"),
        ]:
            with pytest.raises(errors.ExtentError, match=words):
                action()


def test_a_failed_write_is_never_read_and_can_be_written_again(tmp_path: Path) -> None:
    with faulty_engine(Fail(on=("write",), error=errno.EIO, limit=1)) as io, ExtentStore(tmp_path, engine=io) as store:
        store.write("x", bytes(8 * KIB))
        with pytest.raises(errors.DeviceError):
            store.read("x", bytearray(10))
        with pytest.raises(errors.DeviceError):
            store.seal()
        store.write("x", b"\x07" * 8 * KIB)
        # The failed write also has to be answered for once by the next sync of the file.
        with pytest.raises(errors.DeviceError):
            store.seal()
        generation = store.seal()
        check_on_disk(generation.extents["x"][0], b"\x07" * 8 * KIB)


def test_a_read_waits_for_the_write_under_way_and_a_write_for_the_read(tmp_path: Path) -> None:
    with faulty_engine(Delay(seconds=0.05)) as io, ExtentStore(tmp_path, engine=io) as store:
        old, new, out = random_bytes(64 * KIB, 1), random_bytes(64 * KIB, 2), bytearray(64 * KIB)
        store.write("x", old)
        reading = store.read("x", out)
        store.write("x", new)
        reading.wait()
        assert out == old
        assert get(store, "x", len(new)) == new


def test_files_of_old_generations_go_when_nothing_needs_them(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        store.write("x", bytes(10))
        first = store.seal()
        store.write("x", bytes(10))
        second = store.seal()
        assert os.path.exists(first.files[0])
        first.release()
        assert not os.path.exists(first.files[0])
        del second
        store.write("x", bytes(10))
        third = store.seal()
        assert sorted(p.name for p in tmp_path.glob("*.extents")) == [os.path.basename(third.files[0])]


def test_a_store_continues_where_it_was_sealed(paths: list[Path]) -> None:
    data = {name: random_bytes(150 * KIB + seed, seed) for seed, name in enumerate("abc")}
    with ExtentStore(paths, stripe_bytes=64 * KIB) as store:
        for name, content in data.items():
            store.write(name, content)
        store.seal()
        store.write("b", data["c"][:KIB])
        store.seal()
        store.write("a", bytes(150 * KIB))
    with pytest.raises(errors.ExtentError, match="already holds a store 'store' with 2 generations"):
        ExtentStore(paths)
    with ExtentStore(paths, stripe_bytes=64 * KIB, resume=True, verify=True) as store:
        assert get(store, "a", len(data["a"])) == data["a"]
        assert get(store, "b", len(data["b"])) == data["c"][:KIB] + data["b"][KIB:]
        store.write("a", b"more")
        assert store.seal().index == 3


def test_close_with_remove_leaves_nothing_but_links(tmp_path: Path) -> None:
    store = ExtentStore(tmp_path / "s")
    store.write("x", b"content")
    os.link(store.seal().files[0], tmp_path / "link")
    store.write("y", b"open")
    store.close(remove=True)
    store.close(remove=True)
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["store.lock"]
    assert (tmp_path / "link").read_bytes() == b"content"
    with pytest.raises(errors.ClosedError):
        store.write("x", b"")


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    with ExtentStore(tmp_path), pytest.raises(errors.ExtentError, match="in use"):
        ExtentStore(tmp_path)
    with ExtentStore(tmp_path, prefix="one"), ExtentStore(tmp_path, prefix="two"):
        pass


def test_a_store_without_an_engine_of_its_own_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Engine:
        raise OSError(errno.EMFILE, "no descriptor for an engine")

    with monkeypatch.context() as patch:
        patch.setattr(_store, "Engine", refused)
        with pytest.raises(OSError, match="no descriptor for an engine"):
            ExtentStore(tmp_path)
    ExtentStore(tmp_path).close(remove=True)


@pytest.mark.parametrize("damage", ["index", "missing", "short"])
def test_a_damaged_store_is_a_format_error(tmp_path: Path, damage: str) -> None:
    with ExtentStore(tmp_path) as store:
        store.write("x", bytes(5000))
        data = Path(store.seal().files[0])
    index = next(tmp_path.glob("*.index"))
    if damage == "index":
        content = bytearray(index.read_bytes())
        content[-10] ^= 1
        index.write_bytes(content)
    elif damage == "missing":
        data.unlink()
    else:
        data.chmod(0o644)
        os.truncate(data, 4000)
    with pytest.raises(errors.FormatError, match=str(tmp_path)):
        ExtentStore(tmp_path, resume=True)


KILLED = """
import os, sys
from zero_nvme_aio import ExtentStore
with ExtentStore(sys.argv[1], resume=True) as store:
    print("ready", flush=True)
    for number in range(1, 10_000):
        for name in "ab":
            store.write(name, bytes([number % 256]) * 100_000)
        store.seal()
        print(number, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.05])
def test_killed_at_any_instant_the_last_sealed_generation_is_whole(tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.readline()
    process.stdout.readline()
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    sealed = [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    process.wait()
    with ExtentStore(tmp_path, resume=True, verify=True) as store:
        a, b = get(store, "a", 100_000), get(store, "b", 100_000)
    assert a == b == a[:1] * 100_000
    assert a[0] >= max(sealed, default=2) % 256


def test_memory_that_is_aligned_is_never_copied(tmp_path: Path) -> None:
    with Engine() as io, ExtentStore(tmp_path, engine=io) as store:
        buffer = AlignedBuffer(4 << 20)
        store.declare("x", len(buffer))
        store.declare("y", len(buffer))
        store.write("x", buffer).wait()
        store.write("y", memoryview(buffer)[: 1 << 20], 1 << 20).wait()
        store.read("x", buffer).wait()
        counters = io.counters()
        with io.open(store.extents()["x"][0].path) as file:
            if not file.direct:
                pytest.skip(file.direct_reason)
    assert counters["staged_bytes"] == counters["buffered_bytes"] == 0


def test_store_requests_can_be_awaited(tmp_path: Path) -> None:
    async def main(store: ExtentStore) -> bytes:
        out = bytearray(1000)
        assert await store.write("x", b"z" * 1000) == 1000
        assert await store.read("x", out, verify=True) == 1000
        return bytes(out)

    with ExtentStore(tmp_path) as store:
        assert asyncio.run(main(store)) == b"z" * 1000


def test_the_index_is_the_documented_json(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        store.write("x", b"abc")
        store.seal()
    line, body = next(tmp_path.glob("*.index")).read_bytes().split(b"\n", 1)
    assert line.decode() == f"xxh3_64:{xxhash.xxh3_64_hexdigest(body)}"
    table = json.loads(body)
    assert table["extents"]["x"] == [[0, 3, 0, 0, f"xxh3_64:{xxhash.xxh3_64_hexdigest(b'abc')}", ""]]
    assert table["files"]["0"] == ["store.g000001.s0.extents", 3]


def test_a_child_that_was_forked_while_a_store_was_open_does_not_keep_it(tmp_path: Path) -> None:
    store = ExtentStore(tmp_path, prefix="s")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is through
        os._exit(0)
    try:
        store.close(remove=True)
        ExtentStore(tmp_path, prefix="s").close(remove=True)
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
