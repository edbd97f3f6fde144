"""Half precision: loss scales, skipped steps, buffers."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_cases import BATCH, LR, RANKS, WIDE, WIDTH, batch, build, config, distance, outcome, weights, without
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def half(mode: str, stage: int, section: dict[str, Any], **changes: Any) -> zero_core.Engine:
    settings = {**without(config(stage), "data_types"), mode: {"enabled": True, **section}, **changes}
    return zero_core.initialize(model=build(torch.float32, width=WIDE), config=settings)[0]


def one_step(engine: zero_core.Engine, number: int, dtype: torch.dtype, factor: float = 1.0) -> None:
    engine.backward(engine(*batch(number, dtype)) * factor)
    engine.step()


STEP = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}


def dynamic_scale(stage: int) -> dict[str, Any]:
    engine = half("fp16", stage, {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}, scheduler=STEP)
    rank = torch.distributed.get_rank()
    scales, applied, rates = [engine.loss_scale()], [], []
    for number in range(3):
        one_step(engine, number, torch.float16)
        scales.append(engine.loss_scale())
        applied.append(engine.was_step_applied())
        rates.append(engine.get_lr()[0])
    before = weights(engine)
    one_step(engine, 3, torch.float16, math.inf if rank == 1 else 1.0)
    seen = {"still": distance(before, weights(engine)), "skipped": engine.skipped_steps}
    scales.append(engine.loss_scale())
    applied.append(engine.was_step_applied())
    rates.append(engine.get_lr()[0])
    one_step(engine, 4, torch.float16)
    finite = all(bool(torch.isfinite(w).all()) for w in weights(engine).values())
    moved = distance(before, weights(engine)) > 0
    return {**seen, "scales": scales, "applied": applied, "rates": rates, "continues": finite and moved,
            "steps": engine.global_steps, "grown": engine.loss_scale()}  # fmt: skip


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_the_dynamic_loss_scale_skips_on_all_ranks_when_one_overflows(stage: int) -> None:
    for seen in run_ranks(dynamic_scale, RANKS, stage):
        assert seen["scales"] == [16.0, 16.0, 16.0, 32.0, 16.0]  # grows after a clean window *before* a step
        assert seen["applied"] == [True, True, True, False]
        assert seen["still"] == 0.0 and seen["skipped"] == 1 and seen["steps"] == 5 and seen["continues"]
        assert seen["rates"] == [LR / 2, LR / 4, LR / 8, LR / 8]  # the schedule does not move on a skipped step


def static_scale(stage: int) -> tuple[list[float], float, str]:
    engine = half("fp16", stage, {"loss_scale": 128})
    scales, norm = [], 0.0
    for number in range(2):
        one_step(engine, number, torch.float16)
        scales.append(engine.loss_scale())
        norm = norm or engine.get_global_grad_norm() or 0.0
    return scales, norm, outcome(lambda: engine(*batch(2, torch.float16)).backward())


@pytest.mark.parametrize("stage", (0, 3))
def test_the_static_loss_scale_stays_and_the_norm_is_unscaled(stage: int) -> None:
    reference = build(torch.float32, width=WIDE)
    reference(*batch(0, torch.float32, whole=True)).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), math.inf))
    for scales, norm, refusal in run_ranks(static_scale, RANKS, stage):
        assert scales == [128.0, 128.0] and norm == pytest.approx(expected, rel=0.01)
        assert refusal.startswith("PartitionError") and "engine.backward" in refusal and "scale" in refusal


def scaled_by_hand(stage: int) -> tuple[float, str]:
    trained = []
    for by_hand in (False, True):
        engine = half("fp16", stage, {"loss_scale": 128})
        for number in range(3):
            loss = engine(*batch(number, torch.float16))
            if by_hand:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        trained.append(weights(engine))
        again = outcome(lambda: engine(*batch(3, torch.float16)).backward())  # noqa: B023  (called here)
        engine.destroy()
    return distance(*trained), again


@pytest.mark.parametrize("stage", (0, 3))
def test_a_loss_scaled_by_the_engine_may_go_backward_by_hand(stage: int) -> None:
    for apart, again in run_ranks(scaled_by_hand, RANKS, stage):
        assert apart == 0.0 and "engine.scale" in again


def overflow(section: dict[str, Any], stage: int) -> dict[str, Any]:
    engine = half("bf16", stage, section)
    rank = torch.distributed.get_rank()
    one_step(engine, 0, torch.bfloat16)
    before = weights(engine)
    message = outcome(lambda: one_step(engine, 1, torch.bfloat16, math.nan if rank == 1 else 1.0))
    still = distance(before, weights(engine))
    one_step(engine, 2, torch.bfloat16)
    return {"message": message, "still": still, "skipped": engine.skipped_steps, "steps": engine.global_steps,
            "continues": all(bool(torch.isfinite(w).all()) for w in weights(engine).values())}  # fmt: skip


@pytest.mark.parametrize("stage", (1, 3))
def test_bf16_check_grad_overflow_skips_the_step(stage: int) -> None:
    for seen in run_ranks(overflow, RANKS, {"check_grad_overflow": True}, stage):
        assert seen["message"] == "no error" and seen["skipped"] == 1 and seen["steps"] == 3
        assert seen["still"] == 0.0 and seen["continues"]


@pytest.mark.parametrize("section", ({}, {"check_grad_overflow": False}))
def test_without_it_a_gradient_that_is_not_finite_is_an_error_that_names_a_parameter(section: dict[str, Any]) -> None:
    for seen in run_ranks(overflow, RANKS, section, 3):
        assert seen["message"].startswith("NonFiniteGradientError") and "parameter '" in seen["message"]
        assert seen["still"] == 0.0 and seen["continues"] and seen["skipped"] == 0


class WithBuffers(nn.Module):
    """A floating buffer, an integer one, a boolean one, one that is not saved, and with ``statistics`` a BatchNorm."""

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.LayerNorm(WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.count += 1
        h = (self.norm(self.enter(x)) * self.scale * self.mask).to(self.block.weight.dtype)
        return nn.functional.mse_loss(self.head(torch.tanh(self.block(h))).float(), y)


def buffers(
    mode: str,
    stage: int,
    statistics: bool,
    held: torch.dtype = torch.float32,
    buffer_dtype: str | None = None,
) -> dict[str, Any]:
    torch.manual_seed(torch.distributed.get_rank())  # ranks differ before initialize, and not after
    settings = {**config(stage), mode: {"enabled": True}, "data_types": {"buffer_dtype": buffer_dtype}}
    built_inside = stage == 3 and held is torch.float32 and not statistics
    with zero_core.Init(settings) if built_inside else nullcontext():
        model = WithBuffers(statistics).to(held)
    engine = zero_core.initialize(model=model, config=settings)[0]
    for number in range(2):
        one_step(engine, number, HALF[mode])
    module = engine.module
    engine.eval()
    with torch.no_grad():
        loss = engine(*batch(5, HALF[mode]))
    engine.train()
    one_step(engine, 2, HALF[mode])
    return {
        "dtypes": {name: str(b.dtype).removeprefix("torch.") for name, b in module.named_buffers()},
        "values": {name: b.tolist() for name, b in module.named_buffers() if name.startswith("norm.")},
        "count": int(module.count),
        "finite": bool(torch.isfinite(loss)),
        "parameter": str(module.block.weight.dtype),
        "training": module.norm.training,
    }


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("mode", ("bf16", "fp16"))
@pytest.mark.parametrize("chosen", (True, False))
def test_buffers_keep_their_dtypes_unless_the_configuration_has_one_for_floating_ones(
    mode: str, stage: int, chosen: bool
) -> None:
    name = str(HALF[mode]).removeprefix("torch.") if chosen else "float32"
    choice = mode if chosen else None
    for seen in run_ranks(buffers, RANKS, mode, stage, False, torch.float32, choice):
        assert seen["dtypes"] == {"scale": name, "count": "int64", "mask": "bool", "cache": name}
        assert seen["count"] == 4 and seen["finite"] and seen["training"]
        assert seen["parameter"] == str(HALF[mode])


class Scaled(nn.Module):
    """Multiplies with a buffer before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * self.scale)


@pytest.mark.parametrize("mode", ("bf16", "fp16"))
def test_a_wider_buffer_that_makes_torch_refuse_is_named_with_the_key_that_casts_it(mode: str, alone: None) -> None:
    settings = {**without(config(1), "data_types"), mode: {"enabled": True}}
    engine = zero_core.initialize(model=Scaled(), config=settings)[0]
    words = r"forward of 'block' \(Linear\).*a buffer such as 'scale' is torch.float32"
    with pytest.raises(PartitionError, match=words) as raised:
        engine(torch.ones(2, 4, dtype=HALF[mode]))
    assert f'data_types.buffer_dtype to "{mode}"' in str(raised.value)


@pytest.mark.parametrize("held", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("mode", ("bf16", "fp16"))
def test_batch_norm_trains_in_half_precision_with_statistics_in_float32(
    mode: str, stage: int, held: torch.dtype
) -> None:
    for seen in run_ranks(buffers, RANKS, mode, stage, True, held):
        assert seen["dtypes"]["norm.running_mean"] == seen["dtypes"]["norm.running_var"] == "float32"
        assert seen["values"]["norm.num_batches_tracked"] == 3 and min(seen["values"]["norm.running_var"]) > 0
        assert seen["finite"]


def test_auto_cast_casts_floating_inputs(alone: None) -> None:
    engine = half("fp16", 1, {"auto_cast": True, "loss_scale": 1})
    x, y = batch(0, torch.float32)
    assert engine.module.enter.weight.dtype == torch.float16
    assert torch.isfinite(engine(x, y)) and x.shape[0] == BATCH
