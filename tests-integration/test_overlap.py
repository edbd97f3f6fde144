"""`offload_optimizer.overlap`: "exact" against "off", to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist
import zoo
from offload_runs import facts, start
from training import Run

from zero_comm import run_ranks
from zero_settings import Config, ConfigError

CLIPS = {"no clipping": 0.0, "every step clips": 0.01, "none clips": 1e6, "some clip": -1.0}


def settings(stage: int, run: Run, clip: str, **zero: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    more: dict[str, Any] = {}
    if run.dtype == "fp16":
        more = {"data_types": {}, "fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 5}}
    offloaded = {"device": "cpu", **zero.pop("offload_optimizer", {})}
    param = {"offload_param": {"device": "cpu"}} if stage == 3 and zero.pop("weights", "device") == "cpu" else {}
    zero.pop("weights", None)
    return {"offload_optimizer": offloaded, **param, **zero}, {**more, "gradient_clipping": max(CLIPS[clip], 0.5)}


def trained(run: Run, stage: int, clip: str, zero: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Train, looking at weights and states now and then; return what was seen, with the update's counts."""
    zero, own = settings(stage, run, clip, **zero)
    engine = start(run._replace(dtype="fp32") if run.dtype == "fp16" else run, stage, zero, **own, **more)
    seen: list[Any] = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(run.steps):
        if CLIPS[clip] < 0:
            engine.sharded_optimizer.clip = (0.01, 1e6, 1e6)[step % 3]
        elif not CLIPS[clip]:
            engine.sharded_optimizer.clip = 0.0
        for micro in range(run.accumulation):
            loss = sum(engine(*zoo.batch(step, micro, rank, world_size)))
            seen.append(str(float(loss.detach())))
            engine.backward(loss)
            engine.step()
        if step % 9 == 8:
            seen.append(facts(engine))
    seen += [facts(engine), engine.skipped_steps, str(engine.get_global_grad_norm())]
    rate = getattr(engine.offloading.update, "rate", None)
    engine.destroy()
    return {"seen": seen, "rate": None if rate is None else (rate.committed, rate.redone, rate.left)}


def compared(ranks: int, run: Run, stage: int, clip: str, zero: dict[str, Any], **more: Any) -> list[Any]:
    off = run_ranks(trained, ranks, run, stage, clip, zero, more)
    section = {**zero.get("offload_optimizer", {}), "overlap": "exact"}
    exact = run_ranks(trained, ranks, run, stage, clip, {**zero, "offload_optimizer": section}, more)
    for ours, theirs in zip(exact, off, strict=True):
        assert ours["seen"] == theirs["seen"]
    return [one["rate"] for one in exact]


SOAK = pytest.mark.soak
FEW = [
    (1, 2, "fp32", "some clip", 2, 20),
    (2, 3, "fp16", "some clip", 1, 20),
    (3, 1, "fp64", "no clipping", 1, 20),
    (3, 2, "bf16", "every step clips", 1, 20),
    (3, 3, "bf16", "none clips", 1, 20),
]
ALL = itertools.product((1, 2, 3), (1, 2, 3), ("fp32", "bf16", "fp16", "fp64"), CLIPS, (1, 2), (50,))


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "clip", "accumulation", "steps"),
    [*FEW, *(pytest.param(*case, marks=SOAK) for case in ALL)],
)
def test_every_bit_is_that_of_no_overlap(
    stage: int, ranks: int, dtype: str, clip: str, accumulation: int, steps: int
) -> None:
    run = Run(steps=steps, dtype=dtype, accumulation=accumulation)
    rates = compared(ranks, run, stage, clip, {"weights": "cpu" if ranks == 1 else "device"})
    assert all(sum(rate) > 0 for rate in rates)
    if clip == "none clips" and dtype != "fp16":
        assert all(committed > 0 for committed, *_ in rates)


@pytest.mark.parametrize(
    ("stage", "ranks", "zero", "more"),
    [
        (2, 2, {}, {"offload": {"state_dtype": "int8"}}),
        pytest.param(3, 2, {"weights": "cpu"}, {"offload": {"state_dtype": "bf16"}}, marks=SOAK),
        pytest.param(3, 2, {"weights": "cpu", "offload_optimizer": {"ratio": 0.4}}, {}, marks=SOAK),
        pytest.param(2, 2, {"offload_optimizer": {"overlap_journal": 4000}}, {"audit_every": 3}, marks=SOAK),
        pytest.param(3, 2, {}, {"audit_every": 3}, marks=SOAK),
        pytest.param(3, 4, {"mics_shard_size": 2}, {}, marks=SOAK),
        pytest.param(3, 4, {"zero_hpz_partition_size": 2}, {"comm": {"ranks_per_node": 2}}, marks=SOAK),
        pytest.param(3, 2, {"stage3_prefetch_bucket_size": 10**6}, {"reduce_each_micro_batch": True}, marks=SOAK),
        pytest.param(3, 2, {}, {"deterministic": {"across_world_sizes": 4}}, marks=SOAK),
        pytest.param(2, 2, {}, {"data_types": {"grad_accum_dtype": "bf16"}}, marks=SOAK),
    ],
)
def test_every_combination_keeps_every_bit(stage: int, ranks: int, zero: dict[str, Any], more: dict[str, Any]) -> None:
    rates = compared(ranks, Run(steps=12, dtype="bf16", accumulation=2), stage, "some clip", zero, **more)
    assert all(sum(rate) > 0 for rate in rates)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, 'offload_optimizer.device: "none"'),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}}, 'device: "nvme"'),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
            'offload_param.device: "nvme"',
        ),
        ({"offload": {"delayed_update": True}}, "offload.delayed_update: true"),
    ],
)
def test_what_does_not_overlap_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    section = {"device": "cpu", "overlap": "exact"}
    zero = {"stage": 2, **change.get("zero_optimization", {})}
    zero["offload_optimizer"] = {**section, **zero.get("offload_optimizer", {})}
    settings = {"train_batch_size": 1, "zero_optimization": zero, "offload": change.get("offload", {})}
    with pytest.raises(ConfigError, match="zero_optimization.offload_optimizer.overlap: expected") as found:
        Config.load(settings, world_size=1)
    assert said in str(found.value)
