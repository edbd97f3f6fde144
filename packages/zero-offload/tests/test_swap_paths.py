"""Files over several folders: which share each gets, and what becomes of one that is full or fails."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shards import Lender, by_the_kernels, one_step, plans, update_of

from zero_nvme_aio import Engine
from zero_nvme_aio.testing import Fail, faulty_engine
from zero_offload import HostBudget, NvmeStore, OffloadError, ShardError, TierOptions
from zero_offload.limits import Limit
from zero_offload.swap_paths import SwapPaths, need_disk, swap_paths

KEY = "zero_optimization.offload_optimizer.nvme_path"


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [str(tmp_path / name) for name in ("first", "second")]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def even(folders: list[str]) -> SwapPaths:
    return SwapPaths(tuple(folders), (1.0,) * len(folders), KEY)


def on(paths: SwapPaths, engines: list[Engine] | None = None) -> TierOptions:
    return TierOptions(
        tier="nvme", path=paths, sub_group_size=4096, buffer_count=2, verify=True, engine=engines, prefix="optimizer"
    )


def test_shares_are_those_of_the_weights_or_of_the_measured_speed(folders: list[str]) -> None:
    assert swap_paths(folders[0]).shares() == [1.0]
    assert SwapPaths(tuple(folders), (3.0, 1.0)).shares() == [0.75, 0.25]
    measured = swap_paths(folders).shares()
    assert sum(measured) == pytest.approx(1) and min(measured) > 0
    assert swap_paths(folders).shares() == measured  # which are recorded


def test_a_list_with_weights_may_come_from_elsewhere(folders: list[str]) -> None:
    given = SimpleNamespace(folders=folders, weights=[1, 2], key=KEY)
    assert swap_paths(given) == SwapPaths(tuple(folders), (1, 2), KEY)
    assert swap_paths(given).names == [f"'{folders[0]}' ({KEY}[0])", f"'{folders[1]}' ({KEY}[1])"]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_wrong_weights_are_refused(folders: list[str], weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a positive weight for each of 2 folders"):
        swap_paths(SwapPaths(tuple(folders), weights))


def test_the_need_for_space_is_each_folders_share(folders: list[str]) -> None:
    budget = HostBudget(limits={"disk": [Limit("test", 10**6)]})
    need_disk(budget, "files", 1001, SwapPaths(tuple(folders), (3.0, 1.0)))
    need_disk(budget, "nothing", 0, SwapPaths(tuple(folders)))
    assert [(need.path, need.nbytes) for need in budget.needs] == [(folders[0], 751), (folders[1], 251)]


def test_a_folder_that_cannot_be_measured_is_refused(folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "second").touch()
    with pytest.raises(OffloadError, match="cannot measure .*second"):
        NvmeStore(folders, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_an_update_goes_on_without_a_folder_that_takes_no_more_writes(
    folders: list[str], dtype: torch.dtype, error: int
) -> None:
    engines = [Engine(), faulty_engine(Fail(on=("write",), first=40, error=error))]
    lender = Lender(dtype)
    update = update_of(lender, plans(dtype), on(even(folders), engines), gradients="host")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            one_step(update, step)
    assert torch.equal(lender.flat(), by_the_kernels(dtype, 6))
    state = "is full" if error == errno.ENOSPC else "failed"
    said = [str(warning.message) for warning in caught]
    where = re.escape(f"optimizer: the path '{folders[1]}' ({KEY}[1]) of a store {state}")
    assert len(said) == 1 and re.match(where, said[0]), said
    first, second = update.path_use()
    assert (first.share, second.share) == (1.0, 0.0) and second.state == ("full" if state == "is full" else "failed")
    lines = update.report("states")
    assert len(lines) == 3 and f"states: '{folders[1]}' ({KEY}[1]) {second.state}, 0% of what is" in lines[2]
    sealed = update.seal()
    assert sealed is not None and set(sealed.extents)
    update.close()


def test_an_update_fills_a_small_drive_and_goes_on_beside_it(folders: list[str], tmpfs: Path) -> None:
    lender = Lender(torch.float32)
    with pytest.warns(UserWarning, match="is full; what has no place there"):
        update = update_of(lender, plans(torch.float32), on(even([str(tmpfs), folders[0]])), gradients="host")
        for step in range(4):
            one_step(update, step)
    assert torch.equal(lender.flat(), by_the_kernels(torch.float32, 4))
    small, large = update.path_use()
    assert small.bytes_read > 0 and large.bytes_read > 0
    update.close()


def test_a_folder_that_cannot_be_read_ends_the_step_by_tensor_file_and_setting(folders: list[str]) -> None:
    engines = [Engine(), faulty_engine(Fail(on=("read",), first=3))]
    lender = Lender(torch.float32)
    update = update_of(lender, plans(torch.float32), on(even(folders), engines), gradients="host")
    with pytest.raises(ShardError, match=f"cannot read '\\w+/\\w+'.*second.*{re.escape(KEY)}\\[1\\]") as caught:
        for step in range(3):
            one_step(update, step)
    assert caught.value.path is not None and Path(caught.value.path).parent == Path(folders[1])
    update.close()


def test_a_shard_in_a_buffer_outlives_the_folder_it_was_written_to(folders: list[str]) -> None:
    engines = [Engine(), faulty_engine(Fail(on=("read",)), Fail(on=("write",), first=3))]  # header, shard, its tail
    shards = {name: torch.randn(5000) for name in ("a", "b", "c")}
    with NvmeStore(even(folders), device="cpu", buffer_count=3, engine=engines) as store:
        for name, shard in shards.items():
            store.put(name, shard)
        store.flush()
        with pytest.warns(UserWarning, match="failed; from now on all is written to the other paths"):
            for name in shards:
                store.acquire(name).add_(1)
                store.release(name, dirty=True)
            store.flush()
        store.put("d", torch.zeros(5000))  # takes the buffer of the first
        for name, shard in shards.items():
            assert torch.equal(store.acquire(name), shard + 1)
            store.release(name, dirty=False)


def leaves_files(folders: list[str], seal: bool) -> None:
    """Write into a store and die; what it wrote has other names before, so that a living store can be imitated."""
    with NvmeStore(even(folders), device="cpu") as store:
        store.put("a", torch.zeros(5000))
        store.put("b", torch.zeros(5000))
        store.flush()
        sealed = store.seal() if seal else None
        for folder in folders:
            for file in Path(folder).glob("shards.g*"):
                os.link(file, file.with_name(f"left-{file.name}"))
        locks = {lock: lock.read_bytes() for folder in folders for lock in Path(folder).glob("*.lock")}
        del sealed
    for lock, content in locks.items():
        lock.write_bytes(content)
    for folder in folders:
        for file in Path(folder).glob("left-*"):
            file.rename(file.with_name(file.name.removeprefix("left-")))


@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("dropped", [0, 1])
def test_files_in_a_folder_that_is_no_longer_named_are_removed(folders: list[str], dropped: int, seal: bool) -> None:
    leaves_files(folders, seal)
    assert all(list(Path(folder).glob("shards.g*")) for folder in folders)
    with NvmeStore(even([folders[dropped]]), device="cpu", prefix="other") as other:
        other.put("c", torch.ones(5000))
        with NvmeStore(even([folders[1 - dropped]]), device="cpu"):
            assert not any(list(Path(folder).glob("shards.g*")) for folder in folders)
        other.flush()
        assert torch.equal(other.acquire("c"), torch.ones(5000))


def test_a_drive_that_is_full_of_a_killed_stores_files_is_measured_without_them(
    folders: list[str], tmpfs: Path
) -> None:
    paths = [folders[0], str(tmpfs)]
    leaves_files(paths, seal=False)
    ballast = tmpfs / "shards.g000001.s1.extents"
    with ballast.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    with NvmeStore(paths, device="cpu") as store:
        assert min(use.share for use in store.path_use()) > 0 and not ballast.exists()


@pytest.mark.parametrize("gone", [0, 1])
def test_files_are_removed_beside_a_drive_that_is_not_mounted_and_later_on_it(folders: list[str], gone: int) -> None:
    leaves_files(folders, seal=True)
    drive = Path(folders[gone])
    aside = drive.rename(drive.with_name("unmounted"))
    for given in ([folders[1 - gone]], folders):  # not named, then as an empty mount point
        drive.mkdir(exist_ok=True)
        with NvmeStore(even(given), device="cpu"):
            assert not list(Path(folders[1 - gone]).glob("shards.g*"))
    assert list(aside.glob("shards.g*"))
    (drive / "shards.lock").unlink()
    drive.rmdir()
    aside.rename(drive)
    with NvmeStore(even(folders), device="cpu"):
        assert not list(drive.glob("shards.g*"))


def test_files_in_a_folder_that_another_store_uses_now_stay(folders: list[str]) -> None:
    leaves_files(folders, seal=True)
    with NvmeStore(even(folders[1:]), device="cpu", buffer_count=1) as living:
        living.put("c", torch.ones(5000))
        living.put("d", torch.zeros(5000))
        living.flush()
        with NvmeStore(even(folders[:1]), device="cpu") as store:
            store.put("a", torch.zeros(5000))
            store.flush()
        assert torch.equal(living.acquire("c"), torch.ones(5000))


def test_what_was_written_last_is_taken_from_memory_as_the_order_reverses(folders: list[str]) -> None:
    lender = Lender(torch.float32)
    update = update_of(lender, plans(torch.float32), replace(on(even(folders)), buffer_count=4), gradients="host")
    read = [0]
    for step in range(5):
        one_step(update, step)
        read.append(sum(use.bytes_read for use in update.path_use()))
    in_each_step = {after - before for before, after in pairwise(read[1:])}
    kept = 2 * 4096 * 12  # what all buffers hold at the end of a step, but for the next one and one still being written
    assert max(in_each_step) <= update.memory()["nvme"] - kept
    assert torch.equal(lender.flat(), by_the_kernels(torch.float32, 5))
    update.close()
