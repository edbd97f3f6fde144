"""Models of Transformers whose losses and MLPs run in tiles train under the engine as untiled in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training

from zero_comm import run_ranks
from zero_sequence import TiledCausalLoss, tiled

transformers = pytest.importorskip("transformers")

CLASSES, STEPS = 29, 3
SHAPE = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=CLASSES, n_positions=16, **dropout)
    else:
        config = transformers.LlamaConfig(**SHAPE, vocab_size=CLASSES, tie_word_embeddings=kind == "tied llama")
    return transformers.AutoModelForCausalLM.from_config(config).double()


def in_float64(logits: Any, labels: Any, **_: Any) -> torch.Tensor:
    """Transformers' loss, which rounds logits to float32."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (4, 7), generator=torch.Generator().manual_seed(step))


def untiled(kind: str) -> dict[str, torch.Tensor]:
    model = make(kind)
    model.loss_function = in_float64
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model(input_ids=batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def ranks(kind: str, stage: int) -> dict[str, torch.Tensor]:
    import zero_core

    model = make(kind)
    TiledCausalLoss(model, budget_bytes=3 * CLASSES * 16)
    for layer in model.transformer.h if kind == "gpt2" else model.model.layers:
        layer.mlp.forward = partial(tiled, layer.mlp.forward, tiles=3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings = {
        "train_micro_batch_size_per_gpu": 4 // world_size,
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
    for step in range(STEPS):
        ids = batch(step).chunk(world_size)[rank]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    weights = training.weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("kind", ("gpt2", "llama", "tied llama"))
def test_training_in_tiles_follows_the_untiled_run(kind: str, stage: int) -> None:
    assert training.deviation(run_ranks(ranks, 2, kind, stage)[0], untiled(kind)) <= 1e-12
