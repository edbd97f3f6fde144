"""Adapters over a frozen bfloat16 base: what is not trained costs its weights and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from zero_comm import run_ranks

WIDTH, RANK, LAYERS, STEPS, LR = 32, 4, 3, 5, 1e-2
STAGES = (0, 1, 2, 3)
BASE = LAYERS * (WIDTH * WIDTH + WIDTH)
ADAPTERS = LAYERS * 2 * WIDTH * RANK


class Adapted(nn.Module):
    """A frozen bfloat16 layer with a low-rank correction in float32 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.enter = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.leave = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x.bfloat16()).float() + x @ self.enter.t().to(x.dtype) @ self.leave.t().to(x.dtype))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(LAYERS)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(stage: int, policy: dict[str, Any]) -> dict[str, Any]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 6 // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
        **policy,
    }
    model = build()
    base = [p.detach().clone() for m in model for p in m.base.parameters()]
    engine = zero_core.initialize(model=model, config=config)[0]
    for step in range(STEPS):
        x = batch(step)[rank * (6 // ranks) : (rank + 1) * (6 // ranks)]
        engine.backward((engine(x) - 1).square().mean())
        engine.step()
    names = {id(p): name for name, p in model.named_parameters()}
    owned = engine.sharded_optimizer.fragments
    facts: dict[str, Any] = {
        "report": engine.memory_report(),
        "stateful": sorted({o.fragment.entry.name for o in owned if engine.optimizer.state[o.tensor]}),
        "moments": sum(
            t.numel() for state in engine.optimizer.state.values() for t in state.values() if t.dim() and t.numel() > 1
        ),
        "trained units": all(
            {names[id(p)].split(".")[1] for p in unit.parameters} <= {"enter", "leave"}
            for unit in engine.partition.units
            if unit.plan.trainable
        ),
        "dtypes": sorted({str(p.dtype) for m in model for p in m.base.parameters()}),
        "weights": {n: engine.full_param(p) for n, p in model.named_parameters()},
    }
    after = [facts["weights"][n] for n, _ in model.named_parameters() if ".base." in n]
    facts["base kept"] = all(torch.equal(a, b) for a, b in zip(base, after, strict=True))
    engine.destroy()
    return facts


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("policy", [{}, {"bf16": {"enabled": True}}], ids=["fp32 adapters", "bf16 adapters"])
def test_a_frozen_base_has_no_master_no_gradient_and_no_state(stage: int, policy: dict[str, Any]) -> None:
    answers = run_ranks(trained, 2, stage, policy)
    copies = 2 if stage == 0 else 1
    assert sum(answer["moments"] for answer in answers) == 2 * ADAPTERS * copies
    for found in answers:
        assert found["base kept"] and found["trained units"] and found["dtypes"] == ["torch.bfloat16"]
        assert all(name.split(".")[1] in ("enter", "leave") for name in found["stateful"])
        weights = 2 * BASE + (2 if policy else 4) * ADAPTERS
        held = found["report"]["parameter shards"] + found["report"]["gathered parameters"]
        assert held <= (weights // (2 if stage == 3 else 1)) * 1.1
        masters = 4 * ADAPTERS // (1 if stage == 0 else 2) if policy else 0
        assert found["report"]["masters"] <= 1.1 * masters


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_train_as_in_one_process(stage: int) -> None:
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        (model(batch(step)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = run_ranks(trained, 2, stage, {})[0]["weights"]
    for name, p in model.named_parameters():
        assert torch.allclose(ours[name], p, rtol=0, atol=2e-6), name
