"""A generation that is sealed now and made to survive a crash later, while its store continues."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from zero_nvme_aio import ExtentStore, errors
from zero_nvme_aio.testing import Delay, Fail, faulty_engine

KIB = 1024


def get(store: ExtentStore, name: str, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    store.read(name, out).wait()
    return bytes(out)


def found_after_a_crash(folder: Path, copy: Path) -> bytes:
    """Return the contents of a store that is opened on the files as they are now."""
    shutil.copytree(folder, copy)
    with ExtentStore(copy, resume=True) as store:
        return get(store, "x", 8 * KIB)


def test_until_it_is_made_durable_a_crash_leaves_the_generation_before(tmp_path: Path) -> None:
    folder, old, new = tmp_path / "store", b"o" * 8 * KIB, b"n" * 8 * KIB
    with ExtentStore(folder) as store:
        store.write("x", old)
        store.seal()  # and nobody keeps it
        store.write("x", new)
        generation = store.seal(durable=False)
        store.write("x", b"later" * KIB)
        assert found_after_a_crash(folder, tmp_path / "before") == old
        generation.make_durable()
        generation.make_durable()
        assert found_after_a_crash(folder, tmp_path / "after") == new
        assert len(list(folder.glob("*.index"))) == 1  # the one before is let go of
        extent = generation.extents["x"][0]
        assert Path(extent.path).read_bytes()[extent.file_offset_bytes :][: extent.nbytes] == new


def test_a_store_goes_on_while_a_slow_device_syncs(tmp_path: Path) -> None:
    with (
        faulty_engine(Delay(on=("sync",), seconds=2.0)) as io,
        ExtentStore(tmp_path, engine=io) as store,
    ):
        store.write("x", b"1" * 8 * KIB)
        generation = store.seal(durable=False)
        thread = threading.Thread(target=generation.make_durable)
        thread.start()
        assert get(store, "x", 8 * KIB) == b"1" * 8 * KIB
        store.write("x", b"2" * 8 * KIB).wait()
        assert get(store, "x", 8 * KIB) == b"2" * 8 * KIB
        assert thread.is_alive()  # it syncs still
        thread.join()


def test_a_store_goes_on_while_large_files_are_removed_and_closing_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, unlink = threading.Event(), threading.Event(), os.unlink

    def slowly(path: str) -> None:
        if path.endswith(".extents"):
            begun.set()
            assert may_end.wait(30)
        unlink(path)

    store = ExtentStore(tmp_path)
    store.write("x", b"1" * 8 * KIB)
    first = store.seal()
    store.write("x", b"2" * 8 * KIB)
    store.seal()
    monkeypatch.setattr(os, "unlink", slowly)
    remover = threading.Thread(target=first.release)
    remover.start()
    assert begun.wait(30)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(get(store, "x", 8 * KIB)))
    reader.start()
    reader.join(10)
    assert found == [b"2" * 8 * KIB] and remover.is_alive()
    closer = threading.Thread(target=lambda: store.close(remove=True))
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    may_end.set()
    closer.join()
    remover.join()
    assert [path.name for path in tmp_path.iterdir()] == ["store.lock"]


@pytest.mark.parametrize("remove", [False, True])
def test_whoever_closes_or_seals_again_makes_the_one_before_last(tmp_path: Path, remove: bool) -> None:
    store = ExtentStore(tmp_path)
    for content in (b"1", b"2"):
        store.write("x", content * 8 * KIB)
        store.seal(durable=False)
    assert len(list(tmp_path.glob("*.index"))) == 1
    store.close(remove=remove)
    if remove:
        assert [path.name for path in tmp_path.iterdir()] == ["store.lock"]
        return
    with ExtentStore(tmp_path, resume=True) as again:
        assert get(again, "x", 8 * KIB) == b"2" * 8 * KIB


def test_a_sync_that_failed_is_not_tried_again_until_all_was_written_anew(tmp_path: Path) -> None:
    with (
        faulty_engine(Fail(on=("sync",), error=errno.EIO, limit=1)) as io,
        ExtentStore(tmp_path, engine=io) as store,
    ):
        store.write("x", b"1" * 8 * KIB)
        generation = store.seal(durable=False)
        for _ in range(2):
            with pytest.raises(errors.DeviceError, match="sync"):
                generation.make_durable()
        store.write("y", b"3" * 8 * KIB)
        with pytest.raises(errors.DeviceError, match="sync"):
            store.seal()
        store.write("x", b"2" * 8 * KIB)
        store.seal()
        assert get(store, "x", 8 * KIB) == b"2" * 8 * KIB


def test_a_generation_that_is_not_durable_yet_keeps_its_files_until_a_later_one_is(tmp_path: Path) -> None:
    with ExtentStore(tmp_path) as store:
        store.write("x", b"one")
        generation = store.seal(durable=False)
        store.write("x", b"two").wait()
        generation.release()
        assert os.path.exists(generation.files[0])
        store.seal()
        assert not os.path.exists(generation.files[0])
        store.close(remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["store.lock"]
