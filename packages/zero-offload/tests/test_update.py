"""The update of flat shards: the kernels' own arithmetic, on every tier the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import (
    FRAGMENTS,
    GROUPS,
    NUMELS,
    Lender,
    by_the_kernels,
    gradient,
    one_step,
    plans,
    same_states,
    states_of,
    update_of,
)

from zero_offload import (
    DelayedUpdate,
    FragmentPlan,
    OffloadedUpdate,
    OffloadError,
    ShardError,
    ShardPlan,
    TierOptions,
)
from zero_offload.update._staging import StagedSlices, staging_bytes

STEPS = 3


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


def placed(way: str, path: Path) -> tuple[TierOptions, str]:
    options, gradients = WAYS[way]
    if options.get("tier") == "nvme":
        options = {**options, "path": path}
    return TierOptions(**options), gradients


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_tier_gives_the_bits_of_the_kernels(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    tier_options, gradients = placed(way, tmp_path)
    lender = Lender(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with update_of(lender, plans(dtype), tier_options, gradients=gradients) as update:
        for step in range(STEPS):
            one_step(update, step, wide)
        assert not lender.held
        assert update.memory() == update.plan
    assert torch.equal(lender.flat(), by_the_kernels(dtype, STEPS))


def test_weights_in_place_need_no_master(tmp_path: Path) -> None:
    for options in ({}, {"tier": "nvme", "path": tmp_path, "sub_group_size": 4096}):
        lender = Lender(torch.float32)
        with update_of(lender, plans(torch.float32, in_place=True), TierOptions(**options)) as update:
            assert update.kinds("head") == ("exp_avg", "exp_avg_sq")
            for step in range(STEPS):
                one_step(update, step)
            assert sum(update.memory()[what] for what in ("states", "nvme")) == 8 * (29_088 + 13_001)
        assert torch.equal(lender.flat(), by_the_kernels(torch.float32, STEPS))


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8])
def test_low_precision_states_do_not_depend_on_the_cuts(tmp_path: Path, state_dtype: torch.dtype) -> None:
    results, states = [], []
    for way in ("host", "small slices", "nvme", "a part in files"):
        tier_options, gradients = placed(way, tmp_path / way.replace(" ", ""))
        lender = Lender(torch.bfloat16)
        tier_options = replace(tier_options, state_dtype=state_dtype)
        with update_of(lender, plans(torch.bfloat16), tier_options, gradients=gradients) as update:
            for step in range(STEPS):
                one_step(update, step)
            states.append(states_of(update))
        results.append(lender.flat())
    for result, state in zip(results[1:], states[1:], strict=True):
        assert torch.equal(result, results[0])
        assert same_states(state, states[0])
    assert float((results[0].float() - by_the_kernels(torch.bfloat16, STEPS).float()).abs().max()) < 0.05


def test_eight_bit_states_take_a_byte_and_a_scale_for_256() -> None:
    with update_of(Lender(torch.bfloat16), plans(torch.bfloat16), TierOptions(state_dtype=torch.int8)) as update:
        numels = [plan.numel for fragments in FRAGMENTS.values() for plan in fragments]
        assert update.memory()["states"] == sum(4 * n + 2 * (n + 4 * -(-n // 256)) for n in numels)


def test_fragments_that_are_absent_stay_as_they_were_with_their_state(tmp_path: Path) -> None:
    tier_options, gradients = placed("nvme", tmp_path)
    lender = Lender(torch.bfloat16)
    before = lender.tensors["first"][9_000:9_077].clone()
    with update_of(lender, plans(torch.bfloat16), tier_options, gradients=gradients) as update:
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
    tier_options, _ = placed("nvme, gradients too", tmp_path)
    lender = Lender(torch.bfloat16)
    second = lender.tensors["second"].clone()
    with update_of(lender, plans(torch.bfloat16), tier_options, gradients="nvme") as update:
        update.add_gradient("first", gradient(0, "first"))
        update.step()
        assert lender.log == ["borrow first", "give back first"]
        assert set(states_of(update)) == {"embedding", "norm", "matrix"}
    assert torch.equal(lender.tensors["second"], second)


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


class AllAway(StagedSlices):
    """Takes every tensor for one on another device, so that the CPU can stand for an accelerator: copies are real but
    happen at once. `test_gpu.py` is the same beside compute.
    """

    @staticmethod
    def is_away(tensor: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("gradients", ["host", "caller"])
def test_staging_changes_no_bit(gradients: str) -> None:
    lender = Lender(torch.bfloat16)
    with update_of(lender, plans(torch.bfloat16), TierOptions(sub_group_size=4096), gradients=gradients) as update:
        parts = update._parts
        needed = staging_bytes(parts.slices, gradients_too=True)
        # A slice of 4096 float32 gradients and bfloat16 weights, twice, in whole multiples of 64 bytes.
        assert 2 * 6 * 4096 <= needed <= 2 * (6 * 4096 + 4 * 2 * 64)
        device = torch.device("cpu")
        staged = AllAway(parts.slices, parts.gradients, lender, device, staging=needed, pin=False, trace=None)
        update._parts = replace(parts, staged=staged)
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


@pytest.mark.parametrize("way", ["host", "nvme", "delayed"])
def test_a_shard_that_is_not_updated_here_is_named(tmp_path: Path, way: str) -> None:
    update: Any
    if way == "delayed":
        update = DelayedUpdate(plans(torch.float32), "AdamW", lambda: GROUPS, Lender(torch.float32), device="cpu")
    else:
        options = TierOptions(tier="nvme", path=tmp_path) if way == "nvme" else None
        update = update_of(Lender(torch.float32), plans(torch.float32), options, gradients=way)
    for call in (update.weights_changed, update.give_back_gradient, update.borrow_gradient):
        with pytest.raises(ShardError, match="no shard 'unknown' is updated here") as caught:
            call("unknown")
        assert caught.value.tensor == "unknown"
    assert not update.has_gradient("unknown")
    update.close()


def test_wrong_placements_and_calls_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ratio: expected 0 to 1"):
        TierOptions(tier="nvme", path=tmp_path, ratio=1.5)
    with pytest.raises(ValueError, match="state_dtype: expected None"):
        TierOptions(state_dtype=torch.float16)
    with pytest.raises(ValueError, match="gradients='nvme': expected a path"):
        update_of(Lender(torch.float32), plans(torch.float32), gradients="nvme")
    odd = [ShardPlan("s", 9, torch.float32, torch.float32, (FragmentPlan("a", 0, 4, 0, 100),))]
    with pytest.raises(ValueError, match="'a': 8-bit states are in blocks of 256"):
        update_of(Lender(torch.float32), odd, TierOptions(state_dtype=torch.int8))
    assert OffloadedUpdate.supports(torch.optim.AdamW)
    assert not OffloadedUpdate.supports(torch.optim.LBFGS)
    update = update_of(Lender(torch.float32), plans(torch.float32))
    with pytest.raises(ShardError, match="no fragment 'x'"):
        update.kinds("x")
    update.close()
    update.close()
    with pytest.raises(OffloadError, match="closed"):
        update.step()
