"""The update of flat shards: the kernels' own arithmetic, on every tier the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import FRAGMENTS, GROUPS, NUMELS, Lender, gradient, one_step, plans, same_states, states_of, update_of
from torch import nn

from zero_offload import (
    FragmentPlan,
    HostStore,
    NvmeStore,
    OffloadedUpdate,
    OffloadError,
    Placement,
    ShardError,
    ShardPlan,
    Trace,
)
from zero_offload._lanes import Lane
from zero_offload.update._feed import Feed, staging_bytes
from zero_optim_kernels.torch import CPUAdamW

STEPS = 3


def by_the_kernels(dtype: torch.dtype, steps: int, absent: dict[int, str] | None = None) -> torch.Tensor:
    """The same update by `CPUAdamW` over one master per fragment, gradients multiplied before."""
    lender = Lender(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters: dict[str, nn.Parameter] = {}
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in GROUPS]
    for shard, fragments in FRAGMENTS.items():
        for plan in fragments:
            weights = lender.tensors[shard][plan.start : plan.start + plan.numel]
            masters[plan.name] = nn.Parameter(weights.to(wide, copy=True))
            groups[plan.group]["params"].append(masters[plan.name])
    optimizer = CPUAdamW(groups)
    for step in range(steps):
        for shard, fragments in FRAGMENTS.items():
            scaled = gradient(step, shard, wide) * 0.5
            for plan in fragments:
                skipped = (absent or {}).get(step) == plan.name
                masters[plan.name].grad = None if skipped else scaled[plan.start : plan.start + plan.numel].clone()
        optimizer.step()
    for shard, fragments in FRAGMENTS.items():
        for plan in fragments:
            lender.tensors[shard][plan.start : plan.start + plan.numel] = masters[plan.name].detach().to(dtype)
    return lender.flat()


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "host": ({}, "host"),
    "small slices": ({"sub_group_size": 4096}, "host"),
    "nvme": ({"tier": "nvme", "sub_group_size": 8192, "verify": True}, "host"),
    "nvme, gradients too": ({"tier": "nvme", "sub_group_size": 8192, "buffer_count": 2, "verify": True}, "nvme"),
    "one buffer, no overlap": (
        {"tier": "nvme", "sub_group_size": 5000, "buffer_count": 1, "pipeline_read": False, "pipeline_write": False},
        "host",
    ),
    "a part in files": ({"tier": "nvme", "sub_group_size": 4096, "ratio": 0.41}, "nvme"),
    "nothing in files": ({"tier": "nvme", "ratio": 0.0}, "host"),
}


def placed(way: str, path: Path) -> tuple[Placement, str]:
    options, gradients = WAYS[way]
    if options.get("tier") == "nvme":
        options = {**options, "path": path}
    return Placement(**options), gradients


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_tier_gives_the_bits_of_the_kernels(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    placement, gradients = placed(way, tmp_path)
    lender = Lender(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with update_of(lender, plans(dtype), placement, gradients=gradients) as update:
        for step in range(STEPS):
            one_step(update, step, wide)
        assert not lender.held
        assert update.memory() == update.plan
    assert torch.equal(lender.flat(), by_the_kernels(dtype, STEPS))


def test_weights_in_place_need_no_master(tmp_path: Path) -> None:
    for options in ({}, {"tier": "nvme", "path": tmp_path, "sub_group_size": 4096}):
        lender = Lender(torch.float32)
        with update_of(lender, plans(torch.float32, in_place=True), Placement(**options)) as update:
            assert update.kinds("head") == ("exp_avg", "exp_avg_sq")
            for step in range(STEPS):
                one_step(update, step)
            assert sum(update.memory()[what] for what in ("states", "nvme")) == 8 * (29_088 + 13_001)
        assert torch.equal(lender.flat(), by_the_kernels(torch.float32, STEPS))


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8])
def test_low_precision_states_do_not_depend_on_the_cuts(tmp_path: Path, state_dtype: torch.dtype) -> None:
    results, states = [], []
    for way in ("host", "small slices", "nvme", "a part in files"):
        placement, gradients = placed(way, tmp_path / way.replace(" ", ""))
        lender = Lender(torch.bfloat16)
        placement = replace(placement, state_dtype=state_dtype)
        with update_of(lender, plans(torch.bfloat16), placement, gradients=gradients) as update:
            for step in range(STEPS):
                one_step(update, step)
            states.append(states_of(update))
        results.append(lender.flat())
    for result, state in zip(results[1:], states[1:], strict=True):
        assert torch.equal(result, results[0])
        assert same_states(state, states[0])
    assert float((results[0].float() - by_the_kernels(torch.bfloat16, STEPS).float()).abs().max()) < 0.05


def test_eight_bit_states_take_a_byte_and_a_scale_for_256() -> None:
    with update_of(Lender(torch.bfloat16), plans(torch.bfloat16), Placement(state_dtype=torch.int8)) as update:
        numels = [plan.numel for fragments in FRAGMENTS.values() for plan in fragments]
        assert update.memory()["states"] == sum(4 * n + 2 * (n + 4 * -(-n // 256)) for n in numels)


def test_fragments_that_are_absent_stay_as_they_were_with_their_state(tmp_path: Path) -> None:
    placement, gradients = placed("nvme", tmp_path)
    lender = Lender(torch.bfloat16)
    before = lender.tensors["first"][9_000:9_077].clone()
    with update_of(lender, plans(torch.bfloat16), placement, gradients=gradients) as update:
        one_step(update, 0, absent={"norm"})
        assert "norm" not in states_of(update)
        assert torch.equal(lender.tensors["first"][9_000:9_077], before)
        one_step(update, 1)
        one_step(update, 2)
        assert {name: int(state["step"]) for name, state in update.states()} == {
            "embedding": 3,
            "norm": 2,
            "matrix": 3,
            "bias": 3,
            "head": 3,
        }
    assert torch.equal(lender.flat(), by_the_kernels(torch.bfloat16, 3, absent={0: "norm"}))


def test_shards_without_a_gradient_are_not_touched(tmp_path: Path) -> None:
    placement, _ = placed("nvme, gradients too", tmp_path)
    lender = Lender(torch.bfloat16)
    second = lender.tensors["second"].clone()
    with update_of(lender, plans(torch.bfloat16), placement, gradients="nvme") as update:
        update.add_gradient("first", gradient(0, "first"))
        update.step()
        assert lender.log == ["borrow first", "give back first"]
        assert set(states_of(update)) == {"embedding", "norm", "matrix"}
    assert torch.equal(lender.tensors["second"], second)


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_gradients_add_up_can_be_looked_at_changed_and_forgotten(tmp_path: Path, where: str) -> None:
    placement = Placement(tier="nvme", path=tmp_path, buffer_count=1)
    with update_of(Lender(torch.bfloat16), plans(torch.bfloat16), placement, gradients=where) as update:
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


class SlowLane(Lane):
    """Copies that look unfinished until somebody waits for them."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        super().copy(target, source)
        self.waited = False
        lane = self

        class Unfinished:
            def query(self) -> bool:
                return lane.waited

            def synchronize(self) -> None:
                lane.waited = True

        return Unfinished()  # type: ignore[return-value]


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_gradients_that_are_on_their_way_from_a_device_are_waited_for_when_needed(tmp_path: Path, where: str) -> None:
    numel, names = 5000, [f"unit {number}" for number in range(9)]
    shards = [ShardPlan(n, numel, torch.bfloat16, torch.float32, (FragmentPlan(n, 0, numel, 0),)) for n in names]
    results = []
    for slow in (False, True):
        weights = {name: torch.ones(numel, dtype=torch.bfloat16) for name in names}
        placement = Placement(tier="nvme", path=tmp_path, sub_group_size=8192, buffer_count=1)
        with update_of(OneLender(weights), shards, placement, gradients=where) as update:
            if slow:
                update._parts.gradients._lane = SlowLane(torch.device("cpu"))  # type: ignore[attr-defined]
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


def test_the_caller_may_keep_the_gradients() -> None:
    lender = Lender(torch.float16)
    with update_of(lender, plans(torch.float16), gradients="caller") as update:
        for step in range(STEPS):
            update.step(grad_scale=0.5, gradients={shard: gradient(step, shard) for shard in NUMELS})
        with pytest.raises(ValueError, match="if and only if the caller keeps them"):
            update.step()
        with pytest.raises(OffloadError, match="the caller keeps the gradients"):
            update.add_gradient("first", gradient(0, "first"))
        assert update.memory()["gradients"] == 0
    assert torch.equal(lender.flat(), by_the_kernels(torch.float16, STEPS))


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
    placement = Placement(tier="nvme", path=tmp_path / "states", sub_group_size=4096)
    with update_of(store, plans(dtype, in_place=in_place), placement) as update:
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
    with update_of(store, shards, Placement(sub_group_size=4096), gradients="caller") as update:
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


def test_weights_that_somebody_else_wrote_are_taken_over() -> None:
    lender = Lender(torch.bfloat16)
    with update_of(lender, plans(torch.bfloat16)) as update:
        one_step(update, 0)
        kept = states_of(update)["matrix"]["master"]
        lender.tensors["first"][10_000:11_000] = 4.0
        update.weights_changed("first")
        one_step(update, 1, scale=0.0, absent={"embedding", "norm"})
        # With no gradient and these options only the decay moves a weight.
        factor = 1 - 1e-2 * 0.1
        master = states_of(update)["matrix"]["master"]
    exp_avg_moves = (master / factor - kept).abs()
    changed = slice(10_000 - 9_077, 11_000 - 9_077)
    assert bool((master[changed] > 3.9).all())
    assert float(exp_avg_moves[: changed.start].max()) < 0.05


class AllAway(Feed):
    """Takes every tensor for one on another device, so that the CPU can stand for an accelerator: copies are real but
    happen at once. `test_gpu.py` is the same beside compute.
    """

    @staticmethod
    def is_away(tensor: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("gradients", ["host", "caller"])
def test_staging_changes_no_bit(gradients: str) -> None:
    lender = Lender(torch.bfloat16)
    with update_of(lender, plans(torch.bfloat16), Placement(sub_group_size=4096), gradients=gradients) as update:
        parts = update._parts
        needed = staging_bytes(parts.slices, gradients_too=True)
        # A slice of 4096 float32 gradients and bfloat16 weights, twice, in whole multiples of 64 bytes.
        assert 2 * 6 * 4096 <= needed <= 2 * (6 * 4096 + 4 * 2 * 64)
        device = torch.device("cpu")
        feed = AllAway(parts.slices, parts.gradients, lender, device, staging=needed, pin=False, trace=None)
        update._parts = replace(parts, feed=feed)
        for step in range(STEPS):
            if gradients == "host":
                one_step(update, step)
            else:
                update.step(grad_scale=0.5, gradients={shard: gradient(step, shard) for shard in NUMELS})
    assert torch.equal(lender.flat(), by_the_kernels(torch.bfloat16, STEPS))


WRONG: dict[str, tuple[list[ShardPlan], type[Exception], str]] = {
    "name": (
        plans(torch.bfloat16) + plans(torch.bfloat16),
        ValueError,
        "'first': two parameters or shards have this name",
    ),
    "fragment": (
        [ShardPlan("s", 9, torch.float32, torch.float32, (FragmentPlan("a", 0, 4, 0), FragmentPlan("a", 4, 4, 0)))],
        ValueError,
        "'a': two parameters or shards have this name",
    ),
    "overlap": (
        [ShardPlan("s", 9, torch.float32, torch.float32, (FragmentPlan("a", 0, 4, 0), FragmentPlan("b", 3, 4, 0)))],
        ValueError,
        "'b': expected elements between 4 and 9 of shard 's', got 3 to 7",
    ),
    "group": (
        [ShardPlan("s", 9, torch.float32, torch.float32, (FragmentPlan("a", 0, 4, 2),))],
        ValueError,
        "'a': expected a group below 2, got 2",
    ),
    "padding": (
        [ShardPlan("s", 9, torch.float32, torch.float32, (FragmentPlan("a", 0, 4, 0),), padding=6)],
        ValueError,
        "'s': expected at most 5 elements of padding, got 6",
    ),
    "dtype": ([ShardPlan("s", 9, torch.int32, torch.float32, ())], TypeError, "'s': expected float32.*got torch.int32"),
    "gradient": ([ShardPlan("s", 9, torch.float64, torch.float32, ())], TypeError, "gradients of torch.float32 do not"),
    "in place": (
        [ShardPlan("s", 9, torch.bfloat16, torch.float32, (), in_place=True)],
        TypeError,
        "only float32 and float64 weights are updated in place, got torch.bfloat16",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_plans_that_cannot_be_updated_are_named(case: str) -> None:
    shards, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        update_of(Lender(torch.float32), shards)


def test_wrong_placements_and_calls_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ratio: expected 0 to 1"):
        Placement(tier="nvme", path=tmp_path, ratio=1.5)
    with pytest.raises(ValueError, match="state_dtype: expected None"):
        Placement(state_dtype=torch.float16)
    with pytest.raises(ValueError, match="gradients='nvme': expected a path"):
        update_of(Lender(torch.float32), plans(torch.float32), gradients="nvme")
    odd = [ShardPlan("s", 9, torch.float32, torch.float32, (FragmentPlan("a", 0, 4, 0, 100),))]
    with pytest.raises(ValueError, match="'a': 8-bit states are in blocks of 256"):
        update_of(Lender(torch.float32), odd, Placement(state_dtype=torch.int8))
    assert OffloadedUpdate.supports(torch.optim.AdamW)
    assert not OffloadedUpdate.supports(torch.optim.LBFGS)
    update = update_of(Lender(torch.float32), plans(torch.float32))
    with pytest.raises(ShardError, match="no fragment 'x'"):
        update.kinds("x")
    update.close()
    update.close()
    with pytest.raises(OffloadError, match="closed"):
        update.step()


def test_a_step_begins_with_what_the_one_before_left_in_the_buffers(tmp_path: Path) -> None:
    trace = Trace()
    slices, buffers, size = 12, 4, 8192
    shard = ShardPlan("s", slices * size, torch.bfloat16, torch.float32, (FragmentPlan("a", 0, slices * size, 0),))
    weights = {"s": torch.zeros(slices * size, dtype=torch.bfloat16)}
    placement = Placement(tier="nvme", path=tmp_path, sub_group_size=size, buffer_count=buffers)
    with OffloadedUpdate(
        [shard], "AdamW", lambda: GROUPS, OneLender(weights), placement, device="cpu", trace=trace
    ) as update:
        reads = []
        for _ in range(5):
            update.add_gradient("s", torch.ones(slices * size))
            update.step()
            update.flush()
            reads.append(sum(row.nbytes for row in trace.report() if row.hop == "states in"))
            trace.clear()
    assert reads == [0] + 4 * [(slices - buffers) * size * 12]
    trace.close()


class OneLender:
    """Weights in a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        return self._tensors[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """They stay."""


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
