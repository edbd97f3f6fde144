"""Generations that were written only in part: what they leave is taken along, shared where the file system can."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import xxhash
from safetensors import safe_open

from zero_nvme_aio import Engine, ExtentStore, Generation, errors
from zero_nvme_aio.extents._reflink import shares_blocks
from zero_nvme_aio.testing import Fail, faulty_engine

KIB = 1024
MIB = 1024 * KIB


def random_bytes(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def get(store: ExtentStore, name: str, nbytes: int, *, verify: bool = True) -> bytes:
    out = bytearray(nbytes)
    store.read(name, out, verify=verify).wait()
    return bytes(out)


def check_whole(generation: Generation, expected: dict[str, bytes]) -> None:
    """The files of one generation hold everything, with checksums of what is in them."""
    assert set(generation.extents) == set(expected)
    for name, extents in generation.extents.items():
        found = b""
        for extent in extents:
            assert extent.path in generation.files and extent.offset_bytes == len(found)
            with open(extent.path, "rb") as file:
                file.seek(extent.file_offset_bytes)
                data = file.read(extent.nbytes)
            assert extent.checksum == f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}"
            found += data
        assert found == expected[name]


def free_bytes(folder: Path) -> int:
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize


# Sizes that end inside, at and after a block, and begin inside of one.
SIZES = {"frozen": 9 * MIB + 5, "small": 100, "even": 64 * KIB, "trained": 300 * KIB}


def written(store: ExtentStore, sizes: dict[str, int], seed: int) -> dict[str, bytes]:
    content = {name: random_bytes(nbytes, seed + i) for i, (name, nbytes) in enumerate(sizes.items())}
    for name, data in content.items():
        store.declare(name, len(data))
        half = len(data) // 2 + 1
        store.write(name, data[:half])
        store.write(name, data[half:], half)
    return content


def test_where_blocks_can_be_shared_a_generation_is_the_whole_state_and_nothing_is_copied(xfs: Path) -> None:
    folders = [xfs / "a", xfs / "b"]
    with ExtentStore(folders, stripe_bytes=2 * MIB, prefix="shared") as store:
        if not shares_blocks(str(xfs)):
            pytest.skip("this XFS cannot share blocks")
        content = written(store, SIZES, 1)
        generations = [store.seal()]
        for step in range(3):
            assert store.carried_bytes() == 0
            content["trained"] = random_bytes(SIZES["trained"], 50 + step)
            store.write("trained", content["trained"])
            free, counted = free_bytes(xfs), store.bytes_written()
            generations.append(store.seal())
            check_whole(generations[-1], content)
            assert free - free_bytes(xfs) < MIB
            assert store.bytes_written() - counted < len(folders) * 5 * len(SIZES) * 4096  # the ends of extents
        assert generations[-1].kind == "safetensors"
        with safe_open(next(f for f in generations[-1].files if ".s0." in f), "numpy") as file:
            assert any(key.startswith("frozen") for key in file.keys())
        for generation in generations[:-1]:
            generation.release()
        assert {str(path) for folder in folders for path in folder.glob("*.extents")} == set(generations[-1].files)
        for name, data in content.items():
            assert get(store, name, len(data)) == data
        store.close(remove=False)
    with ExtentStore(folders, stripe_bytes=MIB, prefix="shared", resume=True) as store:
        content["small"] = bytes(100)
        store.write("small", content["small"])
        check_whole(store.seal(), content)
        store.close(remove=True)


def test_elsewhere_a_generation_that_is_mostly_past_is_emptied_by_a_copy(tmp_path: Path) -> None:
    if shares_blocks(str(tmp_path)):
        pytest.skip("this file system shares blocks")
    with Engine() as io, ExtentStore(tmp_path, engine=io) as store:
        content = {f"x{i}": random_bytes(MIB + 10 * i, i) for i in range(8)}
        for name, data in content.items():
            store.declare(name, len(data))
            store.write(name, data)
        first = store.seal()

        def rewrite(names: list[str], seed: int) -> Generation:
            for name in names:
                content[name] = random_bytes(len(content[name]), seed)
                store.write(name, content[name])
            return store.seal()

        second = rewrite(["x0", "x1", "x2"], 20)
        assert set(second.extents) == {"x0", "x1", "x2"}  # most of the first is current: it stays beside
        store.write("x3", content["x3"])
        store.write("x4", content["x4"])
        left = sum(len(content[name]) for name in ("x5", "x6", "x7"))
        assert store.carried_bytes() == left
        store.flush()
        counted, moved = store.bytes_written(), io.counters()
        third = store.seal()
        assert set(third.extents) == {"x3", "x4", "x5", "x6", "x7"}
        assert store.bytes_written() - counted == left
        copied = {key: value - moved[key] for key, value in io.counters().items()}
        with io.open(third.files[0]) as file:
            if file.direct:  # read and written in place; only the ends of extents go another way, and the header
                assert copied["zero_copy_bytes"] == 2 * 3 * MIB
        for generation in (first, second, third):
            generation.release()
        assert sorted(map(str, tmp_path.glob("*.extents"))) == sorted([*second.files, *third.files])
        assert store.carried_bytes() == 0
        for name, data in content.items():
            assert get(store, name, len(data)) == data
        sizes = sum(os.stat(path).st_size for path in tmp_path.glob("*.extents"))
        assert sizes <= 2 * sum(map(len, content.values()))


def test_what_is_left_of_an_extent_is_carried_only_when_the_whole_is_what_was_written(folder: Path) -> None:
    with ExtentStore(folder, prefix="part") as store:
        data = random_bytes(2 * MIB, 1)
        store.write("x", data)
        first = store.seal()
        over = random_bytes(1500 * KIB, 2)
        store.write("x", over, 7)
        extent = first.extents["x"][0]
        os.chmod(extent.path, 0o644)
        with open(extent.path, "r+b") as file:
            file.seek(extent.file_offset_bytes + 1900 * KIB)
            good = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([good[0] ^ 1]))
        with pytest.raises(errors.ChecksumError, match="'x' bytes 0 to 2097152") as caught:
            store.seal()
        assert (caught.value.path, caught.value.offset) == (extent.path, extent.file_offset_bytes)
        with open(extent.path, "r+b") as file:
            file.seek(extent.file_offset_bytes + 1900 * KIB)
            file.write(good)
        check_whole(store.seal(), {"x": data[:7] + over + data[7 + len(over) :]})
        store.close(remove=True)


def test_a_flipped_byte_that_was_carried_along_is_still_found(folder: Path) -> None:
    with ExtentStore(folder, prefix="flip") as store:
        sizes = {"past": 3 * MIB, "kept": MIB + 1}
        content = written(store, sizes, 1)
        extent = store.seal().extents["kept"][0]
        os.chmod(extent.path, 0o644)
        with open(extent.path, "r+b") as file:
            file.seek(extent.file_offset_bytes + 4444)
            flipped = file.read(1)[0] ^ 1
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([flipped]))
            os.fsync(file.fileno())
        store.write("past", content["past"])
        generation = store.seal()
        assert "kept" in generation.extents
        with pytest.raises(errors.ChecksumError, match="'kept'") as caught:
            get(store, "kept", sizes["kept"])
        assert caught.value.path == generation.files[0]
        store.close(remove=True)


def test_a_copy_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    fail = Fail(on=("write",), error=errno.ENOSPC, first=7, limit=1)  # of blocks of 1 MiB: the one that is copied
    with faulty_engine(fail) as io, ExtentStore(tmp_path, engine=io) as store:
        store.write("past", bytes(3 * MIB)).wait()
        store.write("kept", b"k" * MIB).wait()
        store.seal()
        store.write("past", bytes(3 * MIB)).wait()
        for _ in range(2):  # the failed write also has to be answered for once by the next sync of the file
            with pytest.raises(errors.NoSpaceError):
                store.seal()
            assert get(store, "kept", MIB) == b"k" * MIB
        check_whole(store.seal(), {"past": bytes(3 * MIB), "kept": b"k" * MIB})
