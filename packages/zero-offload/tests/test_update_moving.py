"""Gradients in, weights lent and given back, states through the ring: what moves, and who waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shards import (
    GROUPS,
    NUMELS,
    Lender,
    OneLender,
    by_the_kernels,
    gradient,
    one_step,
    plans,
    states_of,
    update_of,
)

from zero_offload import (
    FragmentPlan,
    HostStore,
    NvmeStore,
    OffloadedUpdate,
    ShardError,
    ShardPlan,
    TierOptions,
    Trace,
)
from zero_offload._copy_streams import CopyStream

STEPS = 3


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_gradients_add_up_can_be_looked_at_changed_and_forgotten(tmp_path: Path, where: str) -> None:
    tier_options = TierOptions(tier="nvme", path=tmp_path, buffer_count=1)
    with update_of(Lender(torch.bfloat16), plans(torch.bfloat16), tier_options, gradients=where) as update:
        for step in range(3):
            update.add_gradient("second", gradient(step, "second"))
            grad, again = update.borrow_gradient("first")
            assert again == (step > 0)
            grad.copy_(grad + gradient(step, "first") if again else gradient(step, "first"))
            update.give_back_gradient("first")
        for shard in NUMELS:
            want = gradient(0, shard) + gradient(1, shard) + gradient(2, shard)
            with update.gradient(shard) as grad:
                assert torch.equal(grad, want)
        with update.gradient("first", dirty=True) as grad:
            grad.mul_(2)
        with update.gradient("second") as grad, update.gradient("second") as _:
            pass
        with update.gradient("first") as grad:
            assert torch.equal(grad, 2 * (gradient(0, "first") + gradient(1, "first") + gradient(2, "first")))
        update.clear_gradients()
        assert not update.has_gradient("first")
        with pytest.raises(ShardError, match="'first' has no gradient"), update.gradient("first"):
            pass
        update.step()
        assert not states_of(update)
        with pytest.raises(ShardError, match="no shard 'third'"):
            update.borrow_gradient("third")


class SlowCopyStream(CopyStream):
    """Copies that look unfinished until somebody waits for them."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        super().copy(target, source)
        self.waited = False
        stream = self

        class Unfinished:
            def query(self) -> bool:
                return stream.waited

            def synchronize(self) -> None:
                stream.waited = True

        return Unfinished()  # type: ignore[return-value]


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_gradients_that_are_on_their_way_from_a_device_are_waited_for_when_needed(tmp_path: Path, where: str) -> None:
    numel, names = 5000, [f"unit {number}" for number in range(9)]
    shards = [ShardPlan(n, numel, torch.bfloat16, torch.float32, (FragmentPlan(n, 0, numel, 0),)) for n in names]
    results = []
    for slow in (False, True):
        weights = {name: torch.ones(numel, dtype=torch.bfloat16) for name in names}
        tier_options = TierOptions(tier="nvme", path=tmp_path, sub_group_size=8192, buffer_count=1)
        with update_of(OneLender(weights), shards, tier_options, gradients=where) as update:
            if slow:
                update._parts.gradients._copy_stream = SlowCopyStream(torch.device("cpu"))  # type: ignore[attr-defined]
            for step in range(3):
                for _ in range(2):
                    for number, name in enumerate(names):
                        update.add_gradient(name, torch.full((numel,), float(step - number)))
                with update.gradient(names[4]) as gradient:
                    assert float(gradient[0]) == 2 * (step - 4)
                update.step()
                update.clear_gradients()
        results.append(torch.cat(list(weights.values())))
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("kind", ["host", "nvme"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_stores_lend_weights(tmp_path: Path, kind: str, in_place: bool) -> None:
    dtype = torch.float32 if in_place else torch.bfloat16
    start = Lender(dtype)
    store: Any = HostStore(device="cpu")
    if kind == "nvme":
        store = NvmeStore(tmp_path / "weights", device="cpu", buffer_count=3, verify=True)
    for name, tensor in start.tensors.items():
        store.put(name, tensor)
    tier_options = TierOptions(tier="nvme", path=tmp_path / "states", sub_group_size=4096)
    with update_of(store, plans(dtype, in_place=in_place), tier_options) as update:
        for step in range(STEPS):
            one_step(update, step)
    found = []
    for name in NUMELS:
        found.append(store.acquire(name).clone())
        store.release(name, dirty=False)
    assert torch.equal(torch.cat(found), by_the_kernels(dtype, STEPS))


@pytest.mark.parametrize("padding", [0, 96])
def test_weights_that_are_written_whole_are_not_read_and_others_are_read_ahead(tmp_path: Path, padding: int) -> None:
    trace = Trace()
    numel, units = 4096, 6
    names = [f"unit {number}" for number in range(units)]
    store = NvmeStore(tmp_path / "weights", device="cpu", buffer_count=3, trace=trace)
    for name in names:
        store.put(name, torch.ones(numel, dtype=torch.bfloat16))
    used = numel - 96
    shards = [
        ShardPlan(n, numel, torch.bfloat16, torch.float32, (FragmentPlan(n, 0, used, 0),), padding=padding)
        for n in names
    ]
    with update_of(store, shards, TierOptions(sub_group_size=4096), gradients="caller") as update:
        gradients = {name: torch.ones(numel) for name in names}
        update.step(gradients=gradients)
        store.flush()
        trace.clear()
        for _ in range(2):
            update.step(gradients=gradients)
    read = sum(row.nbytes for row in trace.report() if row.hop == "shards in")
    assert read == 0 if padding else read > 0
    for name in names:
        shard = store.acquire(name)
        assert len(set(shard[:used].tolist())) == 1 and float(shard[0]) < 1
        assert set(shard[used:].tolist()) == ({0.0} if padding else {1.0})
        store.release(name, dirty=False)
    store.close()
    trace.close()


def test_a_step_begins_with_what_the_one_before_left_in_the_buffers(tmp_path: Path) -> None:
    trace = Trace()
    slices, buffers, size = 12, 4, 8192
    shard = ShardPlan("s", slices * size, torch.bfloat16, torch.float32, (FragmentPlan("a", 0, slices * size, 0),))
    weights = {"s": torch.zeros(slices * size, dtype=torch.bfloat16)}
    tier_options = TierOptions(tier="nvme", path=tmp_path, sub_group_size=size, buffer_count=buffers)
    with OffloadedUpdate(
        [shard], "AdamW", lambda: GROUPS, OneLender(weights), tier_options, device="cpu", trace=trace
    ) as update:
        reads = []
        for _ in range(5):
            update.add_gradient("s", torch.ones(slices * size))
            update.step()
            update.flush()
            reads.append(sum(row.nbytes for row in trace.report() if row.hop == "states in"))
            trace.clear()
    assert reads[0] == 0
    assert min(reads[1:]) == (slices - buffers) * size * 12
    assert max(reads[1:]) < slices * size * 12  # a buffer whose write takes long is not kept
    trace.close()


@pytest.mark.parametrize("buffer_count", [2, 3, 5])
def test_a_slice_takes_no_more_shards_than_a_store_can_lend(tmp_path: Path, buffer_count: int) -> None:
    names = [f"unit {number}" for number in range(12)]
    numel = 700
    shards = [ShardPlan(n, numel, torch.bfloat16, torch.float32, (FragmentPlan(n, 0, numel, 0),)) for n in names]
    results = []
    for in_files in (False, True):
        torch.manual_seed(0)
        tensors = {name: torch.randn(numel).to(torch.bfloat16) for name in names}
        store: Any = OneLender(tensors)
        if in_files:
            store = NvmeStore(tmp_path / "weights", device="cpu", buffer_count=buffer_count)
            for name, tensor in tensors.items():
                store.put(name, tensor)
        with update_of(store, shards, gradients="caller") as update:
            for _ in range(2):
                update.step(gradients={name: torch.ones(numel) for name in names})
        results.append(
            torch.cat([store.borrow(name).clone() if not in_files else taken(store, name) for name in names])
        )
    assert torch.equal(results[0], results[1])


def taken(store: NvmeStore, name: str) -> torch.Tensor:
    shard = store.acquire(name).clone()
    store.release(name, dirty=False)
    return shard
