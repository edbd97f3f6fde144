"""`audit_every` computes a gradient again in every audit of ordinary models, and raises no alarm."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import architectures
import pytest
import torch
import torch.distributed as dist

from zero_comm import run_ranks

STEPS = 3
NAMES = ("Llama", "BERT", "GPT-2", "ViT", "LoRA", "MLP")


def repeated(names: tuple[str, ...], stage: int) -> dict[tuple[str, bool], list[str | None]]:
    """The units whose gradient each step computed again, by model and by whether activations were checkpointed."""
    return {(n, often): _repeated(n, stage, often) for n in names for often in (False, True) if n != "MLP" or not often}


def _repeated(name: str, stage: int, checkpointed: bool) -> list[str | None]:
    import zero_core

    model = _mlp() if name == "MLP" else architectures.build(name)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "audit_every": 1,
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = zero_core.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config)[0]
    rank, units = dist.get_rank(), []
    for step in range(STEPS):
        if name == "MLP":
            loss = engine(torch.randn(3, 5, dtype=torch.float64)).square().mean()
        else:
            loss = architectures.loss_of(engine(**_batch(name, step, slice(rank * 3, rank * 3 + 3))))
        engine.backward(loss)
        units.append(engine.audit.repeated)
        engine.step()
    engine.destroy()
    return units


def _batch(name: str, step: int, rows: slice) -> dict[str, Any]:
    batch: dict[str, Any] = architectures.batch(name, step, rows)
    return batch | ({"use_cache": False} if name == "LoRA" else {})


def _mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    widths = (5, 16, 16, 2)
    layers = [torch.nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(widths)]
    return torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1], torch.nn.GELU(), layers[2])


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_audit_of_an_ordinary_model_computes_a_gradient_again(stage: int) -> None:
    for found in run_ranks(repeated, 2, NAMES, stage, timeout=300.0):
        assert all(len(units) == STEPS and None not in units for units in found.values()), found
