"""Gradients as the user sees them: the norm, clipping, `p.grad`, `full_grad`."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from engine_cases import RANKS, STAGES, adamw, batch, build, distance, plain, start, train, weights
from torch import nn

from zero_comm import run_ranks
from zero_partition import PartitionError


def norms(stage: int, clip: float) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    engine = start(stage, gradient_clipping=clip)
    first = engine.get_global_grad_norm()
    seen = []
    for number in range(3):
        train(engine, number, number + 1)
        seen.append(engine.get_global_grad_norm())
    return first, seen, weights(engine)  # type: ignore[return-value]


@pytest.mark.parametrize("clip", (0.0, 0.05))
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_and_clipping_are_those_of_torch(stage: int, clip: float) -> None:
    reference = build()
    expected = plain(reference, adamw(reference), 0, 3, clip=clip)
    assert min(expected) > 0.05
    for before, seen, end in run_ranks(norms, RANKS, stage, clip):
        assert before is None and seen == pytest.approx(expected, rel=1e-12)
        assert distance(end, weights(reference)) <= 1e-12


def clipped_by_hand(stage: int) -> tuple[float, float | None, dict[str, torch.Tensor]]:
    engine = start(stage)
    engine.backward(engine(*batch(0)))
    norm = engine.clip_grad_norm_(0.05)
    engine.step()
    return norm, engine.get_global_grad_norm(), weights(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_hand_is_torch_clip_grad_norm(stage: int) -> None:
    reference = build()
    (expected,) = plain(reference, adamw(reference), 0, 1, clip=0.05)
    for norm, of_the_step, end in run_ranks(clipped_by_hand, RANKS, stage):
        assert norm == pytest.approx(expected, rel=1e-12) and of_the_step == pytest.approx(0.05, rel=1e-4)
        assert distance(end, weights(reference)) <= 1e-12


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.used(x), y)


def gradients(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = start(stage, WithUnused().double())
    seen: dict[str, Any] = {}
    used, unused = engine.module.used.weight, engine.module.unused.weight
    seen["full before"] = engine.full_grad(used)
    engine.backward(engine(*batch(0)))
    try:
        seen["visible"] = cast(torch.Tensor, used.grad).clone()
    except PartitionError as refusal:
        seen["visible"] = str(refusal)
    seen["full"], seen["full unused"] = engine.full_grad(used), engine.full_grad(unused)
    seen["unused"] = unused.grad
    engine.step()
    seen["after the step"], seen["full after"] = used.grad, engine.full_grad(used)
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_visible_as_the_stage_promises_and_whole_on_request(stage: int) -> None:
    torch.manual_seed(0)
    reference = WithUnused().double()
    reference(*batch(0, whole=True)).backward()
    expected = reference.used.weight.grad
    assert expected is not None
    for seen in run_ranks(gradients, RANKS, stage):
        assert torch.allclose(seen["full"], expected, rtol=0, atol=1e-14)
        if stage == 0:
            assert torch.allclose(seen["visible"], expected, rtol=0, atol=1e-14)
        else:
            assert "parameter 'used.weight'" in seen["visible"] and "engine.full_grad" in seen["visible"]
        for absent in ("full before", "unused", "full unused", "after the step", "full after"):
            assert seen[absent] is None, absent
