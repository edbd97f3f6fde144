"""The formulas of a step's memory, against the dry run of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_models import VOCABULARY, Block, Decoder
from torch import nn

from zero_plan import Setup, StateBytes, Transformer, estimate_step, fits, load_machine, plan
from zero_plan.cli import main

RANKS, LAYERS, WIDTH, HEADS, KV_HEADS, FFN, SEQUENCE = 4, 2, 512, 4, 2, 1536, 24
SHAPE = Transformer(LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE, kv_heads=KV_HEADS, ffn=FFN, gated=True)


class SizedDecoder(Decoder):
    """A decoder with any number of blocks and words."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__(shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads, shape.key_heads) for _ in range(shape.layers))
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)


def decoder() -> nn.Module:
    return Decoder(WIDTH)


def batch(shape: Transformer, rows: int = 1) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, shape.sequence, dtype=torch.long)
    return {"tokens": tokens, "targets": tokens}


def needs(stage: int, accumulation: int, dtype: str, *, optimizer: bool, parameters: bool) -> tuple[int, int]:
    """Return the bytes on the device and on the host that the dry run finds for one rank."""
    zero: dict[str, Any] = {"stage": stage}
    for section, offloaded in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if offloaded:
            zero[section] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }
    [rank] = plan(decoder, config, batch=batch(SHAPE), world_size=RANKS, ranks=[0]).ranks
    return rank.peak.nbytes, rank.needs().get("pageable host", 0)


EVERY = [
    (stage, offload, accumulation, dtype)
    for stage in range(4)
    for offload in ("none", "optimizer", "all")[: (1, 2, 2, 3)[stage]]
    for accumulation in (1, 4)
    for dtype in ("bf16", "fp32")
]
SHORT = {
    (0, "none", 1, "bf16"),
    (0, "none", 4, "bf16"),
    (1, "none", 4, "bf16"),
    (1, "optimizer", 1, "bf16"),
    (2, "optimizer", 4, "fp32"),
    (3, "none", 4, "bf16"),
    (3, "all", 1, "fp32"),
}


@pytest.mark.parametrize(
    ("stage", "offload", "accumulation", "dtype"),
    [pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.soak]) for case in EVERY],
)
def test_the_estimate_of_a_step_is_what_the_engine_needs(
    stage: int, offload: str, accumulation: int, dtype: str
) -> None:
    optimizer, parameters = offload != "none", offload == "all"
    setup = Setup(
        stage,
        RANKS,
        accumulation=accumulation,
        bytes=StateBytes.of(dtype),
        offload_optimizer="host" if optimizer else "device",
        offload_parameters="host" if parameters else "device",
    )
    found = {row.tier: row.needed for row in estimate_step(SHAPE, setup, load_machine("dgx-2"), dtype="fp32").fits}
    device, host = needs(stage, accumulation, dtype, optimizer=optimizer, parameters=parameters)
    assert 0.97 * device <= found["device"] <= 1.15 * device
    assert found.get("host", 0) == pytest.approx(RANKS * host, rel=0.01)


def test_the_winner_of_fit_fits_by_the_dry_run(tmp_path: Path) -> None:
    """A model of 107 million parameters on 4 devices of 2.2 GB: stage 0 does not fit, by the engine's gradients."""
    shape = Transformer(12, 768, 12, 16000, 512, kv_heads=4, ffn=3 * 768, gated=True)
    sizes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "vocab_size": 16000}
    sizes |= {
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 3 * 768,
    }
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 512}))
    device = ["--machine", "h100-sxm-80gb-x8", "--set", "device.memory=2.2 GB", "--set", "node.devices=4"]
    written = tmp_path / "ds.json"
    asked = ["--shape", str(tmp_path / "config.json"), "--sequence", "512", "--train-batch", "16"]
    assert main(["fit", *asked, *device, "--write", str(written)]) == 0
    config = json.loads(written.read_text())
    machine = load_machine("h100-sxm-80gb-x8").with_values({"device.memory": "2.2 GB", "node.devices": "4"})
    rows = config["train_micro_batch_size_per_gpu"]

    def model() -> nn.Module:
        return SizedDecoder(shape)

    given = {"batch": batch(shape, rows), "world_size": RANKS, "ranks": [0], "machine": machine}
    assert fits(model, config, **given)
    accumulated = {**config, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    wide = {**accumulated, "zero_optimization": {"stage": 0}}
    assert not fits(model, wide, **{**given, "batch": batch(shape)})
    estimated = estimate_step(shape, Setup(0, RANKS, accumulation=4), machine)
    assert not any(row.fits for row in estimated.fits)
