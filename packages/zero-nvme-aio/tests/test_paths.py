"""A store over several paths: shares by weight, and a path that is full, slow or does not answer."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from several_paths import KIB, MIB, UNIT, get, random_bytes, second_is, slow_engine

from zero_nvme_aio import Engine, ExtentStore, errors
from zero_nvme_aio.extents import _transfer
from zero_nvme_aio.testing import Delay, Fail, faulty_engine


@pytest.mark.parametrize(("weights", "expected"), [((3.0, 1.0), 0.75), ((2e9, 2e9), 0.5), (None, 0.5)])
def test_bytes_go_to_the_paths_by_their_weights(
    folders: list[Path], weights: tuple[float, ...] | None, expected: float
) -> None:
    with ExtentStore(folders, stripe_bytes=UNIT, weights=weights) as store:
        store.declare("large", 80 * UNIT)
        store.write("large", bytes(80 * UNIT))
        for number in range(80):
            store.write(f"small {number}", bytes(UNIT - 1))
        first, second = store.path_use()
        assert first.share == expected and first.share + second.share == 1
        assert abs(first.bytes_written / store.bytes_written() - expected) < 0.02
        assert get(store, "large", 80 * UNIT) == bytes(80 * UNIT)
        first, second = store.path_use()
        assert abs(first.bytes_read / (80 * UNIT) - expected) < 0.02
        sizes = {extent.path: 0 for extent in store.extents()["large"]}
        for extent in store.extents()["large"]:
            sizes[extent.path] += extent.nbytes  # every name by itself, so that both are read at once
        assert abs(max(sizes.values()) / (80 * UNIT) - expected) < 0.03


def test_bytes_keep_their_path_from_generation_to_generation(folders: list[Path]) -> None:
    with ExtentStore(folders, stripe_bytes=UNIT, weights=(2, 1)) as store:
        places = []
        for order in ("abc", "cab"):
            for name in order:
                store.write(name, random_bytes(5 * UNIT))
            extents = store.seal().extents
            places.append({n: [Path(e.path).parent.name for e in extents[n]] for n in sorted(extents)})
        assert places[0] == places[1]


@pytest.mark.parametrize("arguments", [{"weights": (1,)}, {"weights": (1, 0)}, {"names": ("one",)}])
def test_wrong_weights_and_names_are_refused(folders: list[Path], arguments: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="of 2 paths"):
        ExtentStore(folders, **arguments)  # type: ignore[arg-type]


def test_a_full_path_keeps_what_fits_and_is_tried_again(folders: list[Path], small_tmpfs: Path) -> None:
    said: list[str] = []
    paths = [folders[0], small_tmpfs]
    with ExtentStore(paths, stripe_bytes=UNIT, tell=said.append, verify=True) as store:
        data = random_bytes(40 * UNIT, 4)
        store.declare("x", len(data))
        store.write("x", data)
        assert get(store, "x", len(data)) == data
        small = [e for e in store.extents()["x"] if Path(e.path).parent == small_tmpfs]
        assert 8 * UNIT < sum(e.nbytes for e in small) < 16 * UNIT
        assert store.path_use()[1].state == "full"
        store.write("x", data[::-1])  # in the places that there are
        assert get(store, "x", len(data)) == data[::-1]
        generation = store.seal()
        assert generation.kind == "safetensors"
        assert store.path_use()[1].state == "in use"
        store.write("x", data)
        assert get(store, "x", len(data)) == data
        store.seal()
    assert len(said) == 1 and "is full" in said[0] and str(small_tmpfs) in said[0]


def test_a_folder_that_was_removed_is_done_without(folders: list[Path]) -> None:
    said: list[str] = []
    data = random_bytes(8 * UNIT, 5)
    with ExtentStore(folders, stripe_bytes=UNIT, tell=said.append) as store:
        shutil.rmtree(folders[1])
        store.write("x", data)
        store.seal()
        assert get(store, "x", len(data)) == data
    assert len(said) == 1 and "it does not exist" in said[0]


def test_a_path_that_slows_is_named_and_gets_fewer_bytes_until_it_is_fast_again(folders: list[Path]) -> None:
    said: list[str] = []
    size = 64 * MIB
    engines = [slow_engine(), slow_engine(Delay(seconds=0.03, limit=48))]
    with ExtentStore(folders, stripe_bytes=MIB, engine=engines, names=["A", "B"], tell=said.append) as store:
        store.declare("x", size)
        shares = []
        for seed in range(12):
            data = random_bytes(MIB, seed) * 64
            store.write("x", data).wait()
            shares.append(store.path_use()[1].share)
        assert get(store, "x", size) == data
        written = store.extents()["x"]
    assert min(shares) < 0.3
    assert shares[-1] == 0.5
    assert len(said) == 1 and "the path B of a store moves" in said[0]
    assert {Path(e.path).parent for e in written} == set(folders)


def test_paths_of_the_same_speed_are_left_alone(folders: list[Path]) -> None:
    said: list[str] = []
    engines = [slow_engine(), slow_engine()]
    with ExtentStore(folders, stripe_bytes=MIB, engine=engines, tell=said.append) as store:
        for _ in range(4):
            store.write("x", bytes(40 * MIB)).wait()
        assert [use.share for use in store.path_use()] == [0.5, 0.5]
    assert not said


def test_stores_with_any_path_in_common_exclude_each_other(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    with ExtentStore([a, b], prefix="p") as store:
        store.write("x", b"content")
        with pytest.raises(errors.ExtentError, match=f"'{b}' is in use"):
            ExtentStore([c, b], prefix="p")
        assert get(store, "x", 7) == b"content"
        ExtentStore([c, b], prefix="q").close(remove=True)
    ExtentStore([c, b], prefix="p").close(remove=True)  # what was refused holds nothing


def test_one_folder_cannot_be_two_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.symlink("a", tmp_path / "link")
    with pytest.raises(errors.ExtentError, match="are the same folder"):
        ExtentStore([tmp_path / "a", tmp_path / "link"])


@pytest.mark.parametrize("seed", range(3))
def test_random_writes_reads_and_seals_while_paths_fail_follow_a_plain_array(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    engines = [
        faulty_engine(Fail(on=("write",), first=40 + 10 * seed)),
        faulty_engine(Fail(on=("write",), first=15, every=7, limit=4, min_offset=8192, error=errno.ENOSPC)),
        faulty_engine(),
    ]
    paths = [tmp_path / name for name in "abc"]
    said: list[str] = []
    weights = (3, 2, 1)
    with ExtentStore(
        paths, stripe_bytes=16 * KIB, engine=engines, weights=weights, tell=said.append, verify=True
    ) as store:
        size = 200 * KIB
        store.declare("n", size)
        mirror = bytearray(size)
        store.write("n", bytes(size))
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
                generation = store.seal()
                expected = bytes(mirror)
        assert get(store, "n", size) == mirror
        for extent in generation.extents["n"]:
            with open(extent.path, "rb") as file:
                file.seek(extent.file_offset_bytes)
                assert file.read(extent.nbytes) == expected[extent.offset_bytes : extent.offset_bytes + extent.nbytes]
    assert sorted("full" in text for text in said) == [False, True]


@pytest.mark.parametrize("seal", [False, True])
def test_a_full_path_is_used_again_when_there_is_room(folders: list[Path], small_tmpfs: Path, seal: bool) -> None:
    data = random_bytes(12 * UNIT, 7)
    ballast = small_tmpfs / "ballast"
    ballast.write_bytes(bytes(12 * UNIT))
    with ExtentStore([folders[0], small_tmpfs], stripe_bytes=UNIT, tell=lambda _: None) as store:
        store.declare("x", len(data))
        store.write("x", data).wait()
        assert store.path_use()[1].state == "full"
        there = sum(e.nbytes for e in store.extents()["x"] if Path(e.path).parent == small_tmpfs)
        assert there < 6 * UNIT
        if seal:
            store.seal()
        else:
            for _ in range(20):
                store.write("x", data).wait()
            assert store.path_use()[1].state == "full"
        ballast.unlink()
        end = time.monotonic() + 60
        while sum(e.nbytes for e in store.extents()["x"] if Path(e.path).parent == small_tmpfs) < 5 * UNIT:
            assert time.monotonic() < end, store.path_use()
            store.write("x", data).wait()
            if seal:
                store.seal()
        assert store.path_use()[1].state == "in use"
        assert get(store, "x", len(data)) == data


def test_a_slow_path_is_found_beside_a_full_one(folders: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    full = faulty_engine(Fail(on=("write",), error=errno.ENOSPC))
    engines = [slow_engine(), slow_engine(Delay(seconds=0.03)), full]
    paths = [*folders, tmp_path / "full"]
    with ExtentStore(paths, stripe_bytes=MIB, engine=engines, names=["A", "B", "C"], tell=said.append) as store:
        for _ in range(4):
            store.write("x", bytes(80 * MIB)).wait()
        assert [use.state for use in store.path_use()] == ["in use", "slow", "full"]
    assert len(said) == 2 and "the path B of a store moves" in said[1]


@pytest.mark.parametrize("as_errors", [False, True])
def test_a_drive_that_does_not_answer_is_named_while_it_is_waited_for(
    folders: list[Path], freezing: Path, monkeypatch: pytest.MonkeyPatch, as_errors: bool
) -> None:
    monkeypatch.setattr(_transfer, "SILENT_SECONDS", 0.2)
    said: list[str] = []
    heard = threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        heard.set()
        if as_errors:
            raise UserWarning(text)

    data = random_bytes(8 * UNIT, 15)
    store = ExtentStore([folders[0], freezing], stripe_bytes=UNIT, names=["A", "drive B"], tell=tell)
    with store if not as_errors else nullcontext():
        store.write("x", bytes(len(data))).wait()
        for _ in range(2):
            said.clear()
            heard.clear()
            if subprocess.run(["fsfreeze", "--freeze", str(freezing)], capture_output=True).returncode != 0:
                pytest.skip("needs fsfreeze and root")
            with ThreadPoolExecutor(1) as pool:
                started = pool.submit(lambda: store.write("x", data).wait())
                try:
                    assert heard.wait(60)
                finally:
                    subprocess.run(["fsfreeze", "--unfreeze", str(freezing)], check=True)
                if as_errors:
                    with pytest.raises(UserWarning, match="drive B"):
                        started.result()
                else:
                    assert started.result() == len(data)
            first, *again = said
            assert "the path drive B of a store has not answered for" in first and set(again) <= {first}
        assert store.path_use()[1].state == "in use"
        assert get(store, "x", len(data)) == data
    if as_errors:
        store.close(remove=True)


@pytest.mark.parametrize("seal", [False, True])
def test_what_a_full_path_holds_is_sealed_though_nothing_fits_any_more(
    folders: list[Path], small_disk: Path, seal: bool
) -> None:
    data = random_bytes(8 * UNIT, 20)
    with ExtentStore([small_disk, folders[0]], stripe_bytes=UNIT, tell=lambda _: None) as store:
        store.write("x", data)
        store.write("y", data)
        if seal:
            store.seal()
        else:
            store.flush()
        with (small_disk / "ballast").open("ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        store.write("x", data[::-1])
        store.carried_bytes()
        store.seal()
        assert get(store, "x", len(data)) == data[::-1] and get(store, "y", len(data)) == data
    with ExtentStore([small_disk, folders[0]], stripe_bytes=UNIT, resume=True, verify=True) as store:
        assert get(store, "x", len(data)) == data[::-1] and get(store, "y", len(data)) == data


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_what_a_seal_takes_along_goes_elsewhere_if_its_path_has_no_room_for_a_header(
    folders: list[Path], engine: Engine, error: int
) -> None:
    data = {f"{number}": random_bytes(UNIT, number) for number in range(8)}
    engines = second_is(engine, Fail(on=("write",), first=4, error=error))  # header, two names, the whole header
    with ExtentStore(folders, stripe_bytes=UNIT, engine=engines, weights=(3, 1), tell=lambda _: None) as store:
        for name in data:
            store.declare(name, UNIT)
        for name, content in data.items():
            store.write(name, content)
        store.seal().release()
        on_second = {n for n, (e,) in store.extents().items() if Path(e.path).parent == folders[1]}
        assert len(on_second) == 2
        for name in data.keys() - on_second:
            store.write(name, data[name])
        assert [Path(file).parent for file in store.seal().files] == [folders[0]]
        for name, content in data.items():
            assert get(store, name, UNIT) == content
