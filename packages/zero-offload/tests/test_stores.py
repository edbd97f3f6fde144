"""Every store keeps what it is given, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_offload import HostStore, NvmeStore, ShardError, StoreFullError, Trace
from zero_offload._copy_streams import DeviceCopies

Store = HostStore | NvmeStore


def across(store: Store) -> Store:
    """Have a store treat the CPU as a device of its own, so that shards are copied there and back."""
    store._copies = DeviceCopies(torch.device("cpu"))
    return store


KINDS: dict[str, Callable[[Path], Store]] = {
    "host": lambda path: HostStore(device="cpu"),
    "host, copied": lambda path: across(HostStore(device="cpu")),
    "nvme": lambda path: NvmeStore(path, device="cpu", buffer_count=2, verify=True),
    "nvme, copied": lambda path: across(NvmeStore(path, device="cpu", buffer_count=2, verify=True)),
    "nvme, one buffer": lambda path: NvmeStore(path, device="cpu", buffer_count=1),
    "nvme, striped": lambda path: NvmeStore([path / "a", path / "b"], device="cpu", buffer_count=2, verify=True),
    "nvme, some in host memory": lambda path: NvmeStore(path, device="cpu", buffer_count=2, host_bytes=20_000),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = KINDS[request.param](tmp_path)
    yield made
    if isinstance(made, NvmeStore):
        made.close()


def shards(sizes: list[int], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.randn(size).to(dtype) for i, size in enumerate(sizes)}


def test_what_was_put_is_acquired_again_after_others_came_between(store: Store) -> None:
    given = {
        **shards([1, 5, 4096, 100_003, 2_500_001, 0]),
        "half": torch.randn(999).to(torch.bfloat16),
        "double": torch.randn(7).double(),
    }
    for name, shard in given.items():
        store.put(name, shard.clone())
    for _ in range(2):
        for name, shard in given.items():
            assert torch.equal(store.acquire(name), shard), name
            store.release(name, dirty=False)


def test_dirty_shards_are_kept(store: Store) -> None:
    given = shards([3, 70_000, 5000, 20_000])
    for name, shard in given.items():
        store.put(name, shard.clone())
    for turn in range(3):
        for name in given:
            store.prefetch([name])
            store.acquire(name).add_(turn + 1)
            store.release(name, dirty=True)
    store.flush()
    for name, shard in given.items():
        want = shard.add(1).add(2).add(3)
        assert torch.equal(store.acquire(name), want)
        store.release(name, dirty=False)


class LateCopies(DeviceCopies):
    """Copies of a device that is busy: a copy to it ends only when it is waited for."""

    def fetch(self, name: str, host: torch.Tensor) -> Any:
        super().fetch(name, host)
        return LateEvent()


class LateEvent:
    """An event of a busy device, which completes when it is waited for."""

    def __init__(self) -> None:
        self.completed = False

    def query(self) -> bool:
        return self.completed

    def synchronize(self) -> None:
        self.completed = True


def test_flush_writes_a_shard_that_was_changed_while_its_copy_to_the_device_was_under_way(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=3, verify=True) as store:
        store._copies = LateCopies(torch.device("cpu"))
        store.put("a", torch.zeros(5000))
        store.flush()
        store.acquire("a").fill_(7)
        store.release("a", dirty=True)
        store.flush()
        (extent,) = store.seal(flush=False).extents["a"]
        with open(extent.path, "rb") as file:
            file.seek(extent.file_offset_bytes)
            kept = torch.frombuffer(bytearray(file.read(extent.nbytes)), dtype=torch.float32)
        assert torch.equal(kept, torch.full((5000,), 7.0))


def test_nested_acquires_see_one_shard_and_the_last_release_keeps_it(store: Store) -> None:
    store.put("a", torch.zeros(5000))
    first, second = store.acquire("a"), store.acquire("a")
    first.fill_(3)
    assert torch.equal(second, first)
    store.release("a", dirty=True)
    second.add_(1)
    store.release("a", dirty=False)
    for name in ("b", "c"):  # take the buffers
        store.put(name, torch.zeros(5000))
    assert torch.equal(store.acquire("a"), torch.full((5000,), 4.0))
    store.release("a", dirty=False)


def test_a_shard_may_be_put_again(store: Store) -> None:
    for value in (1.0, 2.0):
        store.put("a", torch.full((6000,), value))
        assert store.acquire("a")[17] == value
        store.release("a", dirty=False)


def test_prefetching_more_than_fits_is_only_a_hint(store: Store) -> None:
    given = shards([9000] * 6)
    for name, shard in given.items():
        store.put(name, shard.clone())
    store.prefetch(list(given))
    for name in reversed(given):
        assert torch.equal(store.acquire(name), given[name])
        store.release(name, dirty=False)


def test_mistakes_are_named(store: Store) -> None:
    with pytest.raises(ShardError, match="no shard 'x'") as caught:
        store.acquire("x")
    assert caught.value.tensor == "x"
    with pytest.raises(ValueError, match="'y': expected a shard of one dimension"):
        store.put("y", torch.zeros(2, 2))
    store.put("a", torch.zeros(3))
    with pytest.raises(ShardError, match="'a' was released but not acquired"):
        store.release("a", dirty=True)
    store.acquire("a")
    with pytest.raises(ShardError, match="'a' is acquired"):
        store.put("a", torch.ones(3))
    store.release("a", dirty=False)


def test_host_memory_is_the_sum_of_the_shards_to_the_byte() -> None:
    store = HostStore(device="cpu")
    sizes = [1, 3, 1025, 70_001]
    for name, shard in shards(sizes).items():
        store.put(name, shard)
    assert store.resident_bytes == 4 * sum(sizes)
    assert sum(store.acquire(f"layer.{i}").untyped_storage().nbytes() for i in range(4)) == 4 * sum(sizes)


def test_nvme_memory_is_the_ring_whatever_is_stored(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=3) as store:
        for name, shard in shards([10_000] * 20).items():
            store.put(name, shard)
        store.flush()
        assert store.resident_bytes == 3 * 40_960  # 40,000 bytes in whole pages
        assert store.stored_bytes == 20 * 40_000
        assert store.bytes_written() == 20 * 40_000
        assert store.bytes_written_per_day() > store.bytes_written()


def test_first_shards_stay_in_host_memory_up_to_the_bytes_given(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=1, host_bytes=80_000) as store:
        for name, shard in shards([10_000] * 3).items():
            store.put(name, shard)
        assert store.stored_bytes == 40_000
        assert store.resident_bytes == 80_000 + 40_960


def test_holding_more_than_the_ring_has_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=2) as store:
        for name, shard in shards([100] * 3).items():
            store.put(name, shard)
        store.acquire("layer.0")
        store.acquire("layer.1")
        with pytest.raises(StoreFullError, match="all 2 buffers are held \\('layer.*raise buffer_count"):
            store.acquire("layer.2")


def test_a_sealed_generation_is_never_written_again(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=1) as store:
        given = shards([20_000, 30_000])
        for name, shard in given.items():
            store.put(name, shard.clone())
        sealed = store.seal()
        files = {extent.path for pieces in sealed.extents.values() for extent in pieces}
        before = {path: Path(path).read_bytes() for path in files}
        for name in given:
            store.acquire(name).fill_(9)
            store.release(name, dirty=True)
        store.flush()
        assert {path: Path(path).read_bytes() for path in files} == before
        extent = sealed.extents["layer.1"][0]
        begin = extent.file_offset_bytes
        kept = bytearray(before[extent.path][begin : begin + extent.nbytes])
        assert torch.equal(torch.frombuffer(kept, dtype=torch.float32), given["layer.1"])
        assert extent.checksum.startswith("xxh3_64:")
        assert store.acquire("layer.0")[0] == 9


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_files_are_swept(tmp_path: Path, how: str) -> None:
    store = NvmeStore(tmp_path, device="cpu")
    store.put("a", torch.zeros(100_000))
    store.flush()
    assert any(path.stat().st_size for path in tmp_path.iterdir())
    if how == "close":
        store.close()
        store.close()
    else:
        del store
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size and path.suffix != ".lock"]


def test_two_stores_in_one_folder_need_different_prefixes(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu"), NvmeStore(tmp_path, device="cpu", prefix="others"):
        with pytest.raises(RuntimeError, match="in use"):
            NvmeStore(tmp_path, device="cpu")


def test_the_host_copy_can_be_borrowed_and_what_was_written_is_kept(store: Store) -> None:
    for name, shard in shards([4096, 100_003]).items():
        store.put(name, shard)
    before = store.acquire("layer.1").clone()
    if store._copies is not None:
        with pytest.raises(ShardError, match="'layer.1' is acquired; release it before borrowing"):
            store.borrow("layer.1")
    store.release("layer.1", dirty=False)
    store.borrow("layer.1").add_(1)
    store.give_back("layer.1", dirty=True)
    lent = store.borrow("layer.0", fresh=True)
    lent.fill_(3.0)
    store.give_back("layer.0", dirty=True)
    store.flush()
    for name, want in (("layer.1", before + 1), ("layer.0", torch.full((4096,), 3.0))):
        assert torch.equal(store.acquire(name), want)
        store.release(name, dirty=False)
    with pytest.raises(ShardError, match="no shard 'layer.9'"):
        store.borrow("layer.9")


def test_a_borrowed_shard_cannot_be_discarded_and_leaves_no_buffer_behind(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=1) as store:
        for name in "ab":
            store.put(name, torch.ones(5))
        store.borrow("a")
        with pytest.raises(ShardError, match="'a' is borrowed; give it back before discarding it"):
            store.discard("a")
        store.give_back("a", dirty=False)
        store.discard("a")
        assert "a" not in store
        assert torch.equal(store.acquire("b"), torch.ones(5))  # in the only buffer
        store.release("b", dirty=False)


def test_what_is_borrowed_fresh_is_not_read(tmp_path: Path) -> None:
    trace = Trace()
    with NvmeStore(tmp_path, device="cpu", buffer_count=1, trace=trace) as store:
        for name, shard in shards([5000] * 2).items():
            store.put(name, shard)
        for _ in range(2):
            for name in ("layer.0", "layer.1"):
                store.borrow(name, fresh=True).fill_(1.0)
                store.give_back(name, dirty=True)
    assert [(row.hop, row.nbytes) for row in trace.report()] == [("shards out", 6 * 20_000)]
    trace.close()


def test_buffers_of_a_given_size_refuse_a_larger_shard_by_name(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=3, buffer_bytes=40_000) as store:
        assert store.resident_bytes == 3 * 40_960
        store.put("fits", torch.zeros(10_000))
        with pytest.raises(StoreFullError, match="'too large' needs a buffer of 45056 bytes, those of this store have"):
            store.put("too large", torch.zeros(11_000))
        assert store.resident_bytes == 3 * 40_960
        store.acquire("fits")


def test_buffers_that_copies_read_are_waited_for(tmp_path: Path) -> None:
    """Many shards pass through two buffers though every copy to the device still holds its own when the next begins."""
    store = NvmeStore(tmp_path, device="cpu", buffer_count=2)
    store._copies = _SlowCopies(torch.device("cpu"))
    given = shards([3000] * 6)
    for name, shard in given.items():
        store.put(name, shard.clone())
    held = {name: store.acquire(name) for name in given}  # more than there are buffers: they are on the device
    assert all(torch.equal(held[name], shard) for name, shard in given.items())
    for name in given:
        store.release(name, dirty=False)
    store.prefetch(list(given))
    assert all(torch.equal(store.acquire(name), shard) for name, shard in given.items())
    store.close()


def test_hints_that_come_to_nothing_do_not_keep_their_buffers(tmp_path: Path) -> None:
    trace = Trace()
    with NvmeStore(tmp_path, device="cpu", buffer_count=3, trace=trace) as store:
        for name, shard in shards([5000] * 4).items():
            store.put(name, shard)
        store.flush()
        store.prefetch(["layer.0", "layer.1"])
        for cycle in range(40):
            if cycle == 20:
                trace.clear()
            for name in ("layer.2", "layer.3"):
                store.acquire(name)
                store.release(name, dirty=False)
    assert not trace.report()  # the last twenty found both in buffers
    trace.close()


class _SlowEvent:
    """Happens when it is waited for."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


class _SlowCopies(DeviceCopies):
    """Copies that look unfinished until somebody waits."""

    def fetch(self, name: str, host: torch.Tensor) -> torch.Event | None:
        super().fetch(name, host)
        return _SlowEvent()  # type: ignore[return-value]


def test_a_shard_in_host_memory_of_an_nvme_store_keeps_its_size_and_dtype(tmp_path: Path) -> None:
    with NvmeStore(tmp_path, device="cpu", buffer_count=1, host_bytes=80_000) as store:
        store.put("kept", torch.ones(1000))
        for other in (torch.ones(100_000), torch.ones(500), torch.ones(1000, dtype=torch.float16)):
            with pytest.raises(ShardError, match="'kept' was put with 4000 bytes of torch.float32, got"):
                store.put("kept", other)
        store.put("kept", torch.full((1000,), 2.0))
        assert store.acquire("kept").sum() == 2000
        store.release("kept", dirty=False)
