"""Secondary shards (hpZ), copies of the model (HSDP, MiCS): the numbers of plain training, and which bytes leave a
node."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import sharing_runs
import torch
import training
from training import Run

from zero_comm import run_ranks

SOAK = pytest.mark.soak
HPZ = {"zero_hpz_partition_size": 2}
COPIES = {"mics_shard_size": 2}


# -- secondary shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "size"),
    [(4, 2), *(pytest.param(*case, marks=SOAK) for case in ((2, 2), (3, 3), (4, 4), (6, 2), (6, 3)))],
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=SOAK)])
def test_secondary_shards_change_no_bit(world_size: int, size: int, dtype: str) -> None:
    run = Run("frozen and unused", steps=3, accumulation=2, clip=0.1, dtype=dtype)
    ways = [{}, {"zero_hpz_partition_size": size}]
    if size > 2:
        ways = [{**way, "comm": {"ranks_per_node": size}} for way in ways]
    for plain, secondary in run_ranks(sharing_runs.trained, world_size, run, 3, ways):
        assert secondary == plain


@functools.cache
def bytes_across(*ways: str) -> list[list[dict[str, int]]]:
    return run_ranks(sharing_runs.across, 4, Run(dtype="fp32"), [WAYS[way] for way in ways])


QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
ZEROPP = {**HPZ, **QWZ, **QGZ, "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": "auto"}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "hpz": HPZ, "qwz": QWZ, "qgz": QGZ, "all": ZEROPP}


def test_backward_gathers_with_secondary_shards_stay_in_the_node() -> None:
    for plain, secondary, *_ in bytes_across(*WAYS):
        assert plain["forward"] == plain["reduce"] > plain["backward"] > 0  # one unit stays since forward
        assert secondary == {**plain, "backward": 0}


def test_every_codec_saves_its_own_bytes_and_no_others() -> None:
    for plain, _, weights, gradients, everything in bytes_across(*WAYS):
        # units of a few hundred elements: padding and one scale are seen, in either direction
        for gather in ("forward", "backward"):
            assert weights[gather] == pytest.approx(plain[gather] / 4, rel=0.2)
            assert gradients[gather] == pytest.approx(plain[gather], rel=0.2)
        assert weights["reduce"] == pytest.approx(plain["reduce"], rel=0.2)
        assert gradients["reduce"] == pytest.approx(plain["reduce"] / 16, rel=0.2)  # half a byte, to one rank of two
        assert everything["backward"] == 0
        assert everything["forward"] == pytest.approx(plain["forward"] / 4, rel=0.2)
        assert everything["reduce"] == gradients["reduce"]


def test_no_way_of_changing_weights_leaves_a_stale_secondary_shard(tmp_path: Path) -> None:
    plain = run_ranks(sharing_runs.changed, 4, str(tmp_path / "plain"), {})
    secondary = run_ranks(sharing_runs.changed, 4, str(tmp_path / "hpz"), HPZ)
    assert secondary == plain
    assert len(set(plain[0])) == len(plain[0]) - 1  # only parking and coming back changes nothing


def test_the_memory_report_counts_secondary_shards() -> None:
    for (plain, total), (secondary, _) in zip(
        run_ranks(sharing_runs.memory, 4, {}), run_ranks(sharing_runs.memory, 4, HPZ), strict=True
    ):
        assert plain["secondary shards"] == 0
        assert secondary == {**plain, "secondary shards": total // 2}


def optimizer_on(device: str, folder: Path) -> dict[str, Any]:
    """Keys of zero_optimization that keep masters and moments there."""
    (folder / "nvme").mkdir(exist_ok=True)
    return {"offload_optimizer": {"device": device, "nvme_path": str(folder / "nvme")}}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=SOAK), "nvme"])
@pytest.mark.parametrize(
    ("world_size", "size", "dtype"),
    [(4, 2, "fp32"), *(pytest.param(*case, marks=SOAK) for case in
     ((4, 2, "bf16"), (2, 2, "fp32"), (3, 3, "fp32"), (4, 4, "fp32"), (6, 2, "fp32"), (6, 3, "bf16")))],
)  # fmt: skip
def test_secondary_shards_beside_an_offloaded_optimizer_change_no_bit(
    world_size: int, size: int, dtype: str, device: str, tmp_path: Path
) -> None:
    run = Run("frozen", steps=3, dtype=dtype)
    tier = {**optimizer_on(device, tmp_path), "comm": {"ranks_per_node": size}}
    ways = [tier, {**tier, "zero_hpz_partition_size": size}]
    for plain, secondary in run_ranks(sharing_runs.trained, world_size, run, 3, ways):
        assert secondary == plain


@pytest.mark.parametrize(
    ("world_size", "size", "device"),
    [(4, 2, "nvme"), *(pytest.param(*case, marks=SOAK) for case in
     ((4, 2, "none"), (4, 2, "cpu"), (2, 2, "nvme"), (3, 3, "nvme"), (6, 2, "nvme"), (6, 3, "nvme")))],
)  # fmt: skip
def test_a_resumed_run_goes_on_bitwise_over_present_secondary_shards(
    world_size: int, size: int, device: str, tmp_path: Path
) -> None:
    run = Run("frozen", steps=4, dtype="fp32")
    way = {"zero_hpz_partition_size": size, "comm": {"ranks_per_node": size}, **optimizer_on(device, tmp_path)}
    saved = run_ranks(sharing_runs.save, world_size, run, str(tmp_path), 2, way)
    resumed = run_ranks(sharing_runs.resume, world_size, run, str(tmp_path), 2, way)
    assert resumed == [tuple(bits) for *bits, _ in saved]
    without = {key: value for key, value in way.items() if key != "zero_hpz_partition_size"}
    assert run_ranks(sharing_runs.resume, world_size, run, str(tmp_path), 2, without) == resumed


# -- copies of the model ---------------------------------------------------------------------------------------------


@functools.cache
def one_process(run: Run) -> dict[str, torch.Tensor]:
    return sharing_runs.plain(run)


@pytest.mark.parametrize(
    ("world_size", "size"), [(4, 2), *(pytest.param(*case, marks=SOAK) for case in ((2, 1), (4, 1), (6, 2), (6, 3)))]
)
@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=SOAK) for n in (1, 2)), 3])
def test_copies_of_the_model_follow_the_oracle(world_size: int, size: int, stage: int) -> None:
    run = Run("frozen and unused", steps=4, accumulation=2, clip=0.1)
    found = run_ranks(sharing_runs.weights, world_size, run, stage, {"mics_shard_size": size})[0]
    assert training.deviation(found, one_process(run)) <= 1e-12


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=SOAK), "bf16"])
def test_gathers_of_a_copy_stay_in_the_node_and_reductions_cross_it_once(dtype: str) -> None:
    ways = [{}, COPIES, {**COPIES, **QGZ}]
    for plain, copies, codes in run_ranks(sharing_runs.across, 4, Run(dtype=dtype), ways):
        assert copies["forward"] == copies["backward"] == codes["forward"] == codes["backward"] == 0
        # half of the gradient there and back again, against the other node's half to two ranks
        assert copies["reduce"] == pytest.approx(plain["reduce"], rel=0.1)
        # half a byte there, one back; scales and padding of small units are seen
        assert codes["reduce"] == pytest.approx(plain["reduce"] * 0.75 / training.DTYPES[dtype].itemsize, rel=0.2)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SOAK), pytest.param(2, marks=SOAK), 3])
def test_a_checkpoint_of_copies_is_written_once_and_loads_into_another_cut(tmp_path: Path, stage: int) -> None:
    run = Run("frozen", steps=4, dtype="fp32")
    copies, whole = {**COPIES, "stage": stage}, {"stage": 3}
    half, end, files = run_ranks(sharing_runs.save, 4, run, str(tmp_path), 2, copies)[0]
    assert len(files) == 2  # one for each rank of the first copy
    assert run_ranks(sharing_runs.resume, 4, run, str(tmp_path), 2, copies) == [(half, end)] * 4
    assert run_ranks(sharing_runs.resume, 2, run, str(tmp_path), 2, whole)[0][0] == half
    half, _, _ = run_ranks(sharing_runs.save, 2, run, str(tmp_path / "whole"), 2, whole)[0]
    assert all(
        loaded == half for loaded, _ in run_ranks(sharing_runs.resume, 4, run, str(tmp_path / "whole"), 2, copies)
    )


def test_copies_beside_offload_follow_the_run_without() -> None:
    run = Run("frozen", steps=3, dtype="fp32")
    tiers = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    on_device = run_ranks(sharing_runs.weights, 4, run, 3, COPIES)[0]
    assert training.deviation(run_ranks(sharing_runs.weights, 4, run, 3, {**COPIES, **tiers})[0], on_device) <= 1e-6


# -- codecs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [4, *(pytest.param(n, marks=SOAK) for n in (1, 2, 3, 6))])
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=SOAK), pytest.param(2, marks=SOAK)])
def test_the_tutorials_configuration_trains_at_any_world_size(world_size: int, stage: int) -> None:
    run = Run("frozen and unused", steps=8, accumulation=2, clip=0.1, dtype="fp32")
    size = 2 if world_size % 2 == 0 else world_size
    way = {**ZEROPP, "zero_hpz_partition_size": size, "comm": {"ranks_per_node": size}}
    quantized = run_ranks(sharing_runs.weights, world_size, run, stage, way)[0]
    plain = one_process(run)
    # no further from the plain run, of the way that it went, than a quarter: up to 0.17, and 0 on one rank
    assert distance(quantized, plain) < 0.25 * distance(plain, initial(run))


@pytest.mark.parametrize(
    ("world_size", "size", "per_node", "stage"),
    [
        (4, 2, 2, 3),
        *(pytest.param(*case, marks=SOAK) for case in ((4, 2, 2, 1), (4, 1, 2, 2), (6, 2, 3, 3), (6, 3, 3, 2))),
    ],
)
def test_copies_train_with_codes_between_them(world_size: int, size: int, per_node: int, stage: int) -> None:
    run = Run("frozen and unused", steps=10, accumulation=2, clip=0.1, dtype="fp32")
    way = {**QGZ, **QWZ, "mics_shard_size": size, "comm": {"ranks_per_node": per_node}}
    quantized = run_ranks(sharing_runs.weights, world_size, run, stage, way)[0]
    plain, start = one_process(run), initial(run)
    # no further from the plain run, of the way that it went, than a quarter: 0.15 without copies
    assert 0 < distance(quantized, plain) < 0.25 * distance(plain, start)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The length of the difference of all weights as one vector."""
    return math.hypot(*(float((one[name] - other[name]).norm()) for name in one))


def initial(run: Run) -> dict[str, torch.Tensor]:
    return sharing_runs.plain(run._replace(steps=0))


@pytest.mark.parametrize(
    "codecs", [{}, pytest.param({"weight_codec": "fp8_e4m3", "gradient_codec": "fp8_e4m3"}, marks=SOAK)]
)
def test_what_is_rounded_is_what_passes_compute_with_and_nothing_that_is_kept(codecs: dict[str, str]) -> None:
    for rank in run_ranks(sharing_runs.rounded, 4, {**ZEROPP, "comm": codecs}):
        assert rank["forward differs"] and not rank["whole differs"] and not rank["after gathered differs"]
        assert rank["frozen only"] == (False, True)
