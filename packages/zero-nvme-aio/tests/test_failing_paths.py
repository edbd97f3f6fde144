"""A store over several paths of which one fails: its writes go to another path, and whoever waits for them is told."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from several_paths import UNIT, get, random_bytes, second_is

from zero_nvme_aio import Engine, ExtentStore, errors
from zero_nvme_aio.testing import Delay, Fail, faulty_engine


def test_a_path_that_fails_in_writing_is_named_once_and_the_others_take_its_bytes(
    folders: list[Path], engine: Engine
) -> None:
    said: list[str] = []
    engines = second_is(engine, Fail(on=("write",), first=6))
    names = ["drive A", "drive B"]
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines, names=names, tell=said.append) as store:
        old, new = random_bytes(20 * UNIT, 1), random_bytes(20 * UNIT, 2)
        first = store.write("x", old)  # six units reach the second path, four do not
        assert first.wait() == 20 * UNIT
        assert first.done()
        assert get(store, "x", 20 * UNIT) == old
        on_second = [e for e in store.extents()["x"] if Path(e.path).parent == folders[1]]
        assert sum(e.nbytes for e in on_second) == 6 * UNIT
        generation = store.seal()
        store.write("x", new)
        assert get(store, "x", 20 * UNIT) == new
        later = store.seal()
        assert [Path(file).parent for file in later.files] == [folders[0]]
        uses = store.path_use()
        assert [use.state for use in uses] == ["in use", "failed"] and [use.share for use in uses] == [1.0, 0.0]
        for extent, data in [(e, old) for e in generation.extents["x"]] + [(e, new) for e in later.extents["x"]]:
            with open(extent.path, "rb") as file:
                file.seek(extent.file_offset_bytes)
                assert file.read(extent.nbytes) == data[extent.offset_bytes : extent.offset_bytes + extent.nbytes]
    assert len(said) == 1 and "the path drive B of a store failed" in said[0] and "Input/output error" in said[0]


def test_without_tell_a_failed_path_is_a_warning(folders: list[Path], engine: Engine) -> None:
    with ExtentStore(folders, stripe_bytes=UNIT, engine=second_is(engine, Fail(on=("write",)))) as store:
        with pytest.warns(UserWarning, match=f"the path '{folders[1]}' of a store failed"):
            store.write("x", bytes(4 * UNIT)).wait()


@pytest.mark.parametrize("way", ["flush", "read", "done", "overwrite", "seal", "await"])
def test_a_failed_write_moves_whoever_finds_it(folders: list[Path], engine: Engine, way: str) -> None:
    said: list[str] = []
    engines = second_is(engine, Fail(on=("write",), error=errno.EROFS))
    data = random_bytes(8 * UNIT, 3)
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines, tell=said.append) as store:
        store.declare("x", 8 * UNIT)
        request = store.write("x", data)
        if way == "flush":
            store.flush()
        elif way == "seal":
            assert store.seal().kind == "safetensors"
        elif way == "done":
            while not request.done():
                pass
            assert request.wait(0) == len(data)
        elif way == "overwrite":
            data = data[:UNIT] + bytes(UNIT) + data[2 * UNIT :]
            store.write("x", bytes(UNIT), UNIT)
        elif way == "await":

            async def waits() -> int:
                return await request

            assert asyncio.run(waits()) == len(data)
        assert get(store, "x", len(data)) == data
        assert {Path(e.path).parent for e in store.extents()["x"]} == {folders[0]}
        store.write("x", data[:UNIT], 0)
        assert store.seal().kind == "safetensors"
    assert len(said) == 1


def test_a_store_whose_first_path_fails_is_sealed_on_another_and_resumes(folders: list[Path], engine: Engine) -> None:
    data = random_bytes(8 * UNIT, 6)
    engines = [faulty_engine(Fail(on=("write",))), engine]
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines, tell=lambda _: None) as store:
        store.write("x", data).wait()
        store.seal()
    assert [path.name for path in folders[1].glob("*.index")] == ["store.g000001.index"]
    with ExtentStore(folders, stripe_bytes=UNIT, resume=True, verify=True) as store:
        assert get(store, "x", len(data)) == data


def test_when_no_path_is_left_the_error_names_the_last(folders: list[Path]) -> None:
    said: list[str] = []
    engines = [faulty_engine(Fail(on=("write",))), faulty_engine(Fail(on=("write",)))]
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines, names=["A", "B"], tell=said.append) as store:
        request = store.write("x", bytes(4 * UNIT))
        with pytest.raises(errors.DeviceError, match="the path is [AB]$"):
            request.wait()
        with pytest.raises(errors.DeviceError):
            store.read("x", bytearray(4 * UNIT))
    assert len(said) == 1


def test_a_read_that_fails_is_an_error_with_the_path(folders: list[Path], engine: Engine) -> None:
    engines = second_is(engine, Fail(on=("read",)))
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines, names=["A", "drive B"]) as store:
        store.write("x", bytes(4 * UNIT)).wait()
        with pytest.raises(errors.DeviceError, match="the path is drive B$") as caught:
            get(store, "x", 4 * UNIT)
        assert caught.value.path is not None and Path(caught.value.path).parent == folders[1]


def test_an_error_that_is_not_the_drives_is_not_moved(folders: list[Path], engine: Engine) -> None:
    engines = second_is(engine, Fail(on=("write",), error=errno.EINVAL))
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines) as store:
        with pytest.raises(errors.TransferError, match="Invalid argument"):
            store.write("x", bytes(4 * UNIT)).wait()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("way", ["wait", "done", "read", "flush", "seal", "overwrite"])
def test_where_warnings_are_errors_a_write_moves_all_the_same(
    folders: list[Path], engine: Engine, way: str, error: int
) -> None:
    engines = second_is(engine, Fail(on=("write",), error=error))
    data = random_bytes(8 * UNIT, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = ExtentStore(folders, stripe_bytes=UNIT, engine=engines)
        request = store.write("x", data)
        if way == "done":
            while not request.done():
                pass
        with pytest.raises(UserWarning, match="of a store"):
            if way == "read":
                get(store, "x", len(data))
            elif way == "flush":
                store.flush()
            elif way == "seal":
                store.seal()
                store.close(remove=False)
            elif way == "overwrite":
                store.write("x", data)
                store.write("x", data)
            else:
                request.wait()
        if way == "seal":
            store = ExtentStore(folders, stripe_bytes=UNIT, resume=True, verify=True)
        else:
            assert request.wait() == len(data)
        assert get(store, "x", len(data)) == data
        assert {Path(e.path).parent for e in store.extents()["x"]} == {folders[0]}
        store.close(remove=True)


def test_a_wait_that_gives_up_does_not_keep_a_write_from_moving(folders: list[Path]) -> None:
    late = faulty_engine(Delay(seconds=0.3, limit=1), Fail(on=("write",)), queue_depth=1, threads=1)
    data = random_bytes(UNIT, 9)
    with ExtentStore(
        folders, stripe_bytes=UNIT, engine=[faulty_engine(), late], weights=(1, 1000), tell=lambda _: None
    ) as store:
        store.write("first", data)
        request = store.write("x", data)
        with pytest.raises(errors.WaitTimeoutError):
            request.wait(0)
        assert request.wait() == len(data)
        assert get(store, "x", len(data)) == data
        assert [use.state for use in store.path_use()] == ["in use", "failed"]


def test_several_threads_that_wait_for_a_failed_write_move_it_once(folders: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    third = faulty_engine(Delay(seconds=0.005))
    engines = [faulty_engine(), faulty_engine(Fail(on=("write",))), third]
    data = random_bytes(60 * UNIT, 10)
    with ExtentStore(
        [*folders, tmp_path / "third"], stripe_bytes=UNIT, engine=engines, tell=said.append, weights=(1, 20, 20)
    ) as store:
        request = store.write("x", data)
        with ThreadPoolExecutor(8) as pool:
            waits = [pool.submit(request.wait) for _ in range(8)]
            assert [wait.result() for wait in waits] == [len(data)] * 8
        assert get(store, "x", len(data)) == data
        assert [use.state for use in store.path_use()] == ["in use", "failed", "in use"]
    assert len(said) == 1


def test_a_write_that_moved_can_be_waited_for_after_its_bytes_were_written_again(
    folders: list[Path], engine: Engine
) -> None:
    old, new = random_bytes(8 * UNIT, 11), random_bytes(8 * UNIT, 12)
    with ExtentStore(
        folders, stripe_bytes=UNIT, engine=second_is(engine, Fail(on=("write",))), tell=lambda _: None
    ) as store:
        first = store.write("x", old)
        second = store.write("x", new)
        assert first.wait() == first.wait() == second.wait() == len(new)
        assert get(store, "x", len(new)) == new


def test_a_failed_write_whose_bytes_were_written_again_is_not_written_over_them(folders: list[Path]) -> None:
    full = [Fail(on=("write",), error=errno.ENOSPC, limit=4)]
    old, new = random_bytes(4 * UNIT, 13), random_bytes(4 * UNIT, 14)
    engines = [faulty_engine(*full), faulty_engine(*full)]
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines, tell=lambda _: None) as store:
        first = store.write("x", old)
        with pytest.raises(errors.NoSpaceError):
            first.wait()
        while True:  # until there is room
            try:
                store.write("x", new).wait()
                break
            except errors.NoSpaceError:
                pass
        with pytest.raises(errors.NoSpaceError):
            first.wait()
        store.flush()
        assert get(store, "x", len(new)) == new
        store.seal()
    with ExtentStore(folders, stripe_bytes=UNIT, resume=True, verify=True) as store:
        assert get(store, "x", len(new)) == new


@pytest.mark.parametrize("first", [True, False])
def test_a_sealed_store_goes_on_when_the_drive_with_its_index_takes_no_more_writes(
    folders: list[Path], small_disk: Path, first: bool
) -> None:
    said: list[str] = []
    paths = [small_disk, folders[0]] if first else [folders[0], small_disk]
    data = [random_bytes(8 * UNIT, seed) for seed in (16, 17, 18)]
    store = ExtentStore(paths, stripe_bytes=UNIT, tell=said.append)
    store.write("x", data[0])
    store.write("y", data[0])
    old = store.seal()
    subprocess.run(["mount", "-o", "remount,abort", str(small_disk)], check=True)
    for content in data[1:]:
        store.write("x", content)
        generation = store.seal()
        assert {Path(file).parent for file in generation.files} == {folders[0]}
        old.release()
        assert get(store, "x", len(content)) == content and get(store, "y", len(data[0])) == data[0]
    store.close(remove=True)
    assert len(said) == 1 and "read-only" in said[0].lower()
    assert not list(folders[0].glob("*.extents"))


def test_a_drive_that_takes_no_more_writes_is_no_error_when_an_old_generation_goes(
    folders: list[Path], small_disk: Path
) -> None:
    with ExtentStore([small_disk, folders[0]], stripe_bytes=UNIT, tell=lambda _: None) as store:
        store.write("x", random_bytes(8 * UNIT, 19))
        old = store.seal()
        store.write("x", bytes(8 * UNIT))
        store.seal()
        subprocess.run(["mount", "-o", "remount,abort", str(small_disk)], check=True)
        old.release()
        assert all(map(os.path.exists, old.files))  # for its index, which could not be removed, is there
        assert get(store, "x", 8 * UNIT) == bytes(8 * UNIT)
    with pytest.raises(OSError, match="Read-only"):
        ExtentStore([small_disk, folders[0]], stripe_bytes=UNIT, resume=True)
