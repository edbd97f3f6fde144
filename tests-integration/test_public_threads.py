"""Reports of other projects' users, reproduced here; docs/public-threads.md names the threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_frameworks import EXAMPLES, final_loss, run
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import zero_core
from zero_comm import run_ranks

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
VISION = {**TEXT, "image_size": 16, "patch_size": 8, "projection_dim": 32}
IMAGE = 63
"""The token in whose places the picture's four patches stand."""
STEPS = 3


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero, **changes}


def distance(engine: zero_core.Engine, plain: torch.nn.Module) -> float:
    pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
    return max(float((engine.full_param(ours) - theirs).abs().max()) for ours, theirs in pairs)


def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_index=IMAGE
    )
    return LlavaForConditionalGeneration(config).double()


def sample(step: int, rank: int) -> dict[str, torch.Tensor]:
    """A sample of text on rank 1 and in the last step, else one with a picture."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(0, IMAGE, (1, 12), generator=generator)
    if rank == 1 or step == STEPS - 1:
        return {"input_ids": words, "labels": words.clone()}
    words[0, :4] = IMAGE
    pixels = torch.randn(1, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"input_ids": words, "labels": words.clone(), "pixel_values": pixels}


def pictures_on_one_rank(stage: int) -> float:
    """Train with a picture on rank 0 alone; return the distance from one process that has both samples."""
    engine = zero_core.initialize(model=llava(), config=settings(stage, data_types={"param_dtype": "fp64"}))[0]
    plain = llava()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3, weight_decay=0.0)
    for step in range(STEPS):
        engine.backward(engine(**sample(step, dist.get_rank())).loss)
        engine.step()
        for rank in range(2):
            (plain(**sample(step, rank)).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = distance(engine, plain)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_picture_on_one_rank_and_text_alone_on_the_other_train_as_in_one_process(stage: int) -> None:
    assert max(run_ranks(pictures_on_one_rank, 2, stage)) < 1e-10


def accumulated(stage: int) -> float:
    """Train with four micro-batches of one row a step, and with one of four; return the distance of the weights."""
    rows = torch.randint(0, 64, (STEPS, 4, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    models = []
    for micro, steps in ((1, 4), (4, 1)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**TEXT)).double()
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        engine = zero_core.initialize(model=model, config=settings(stage, data_types={"param_dtype": "fp64"}, **sizes))[
            0
        ]
        for batch in rows:
            for part in batch.split(micro):
                engine.backward(engine(input_ids=part, labels=part).loss)
                engine.step()
        assert engine.global_steps == STEPS
        engine.destroy()
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_accumulation_trains_as_one_batch_of_its_rows(stage: int) -> None:
    assert max(run_ranks(accumulated, 2, stage)) < 1e-10


@pytest.mark.parametrize("config", ["ds_zero2", "ds_zero3"])
def test_trainer_resumes_on_another_number_of_ranks(config: str, tmp_path: Path) -> None:
    script, settings = str(Path(__file__).with_name("_resume_training.py")), str(EXAMPLES / f"{config}.json")
    losses = []
    for ranks, begin in ((2, 0), (1, 2), (2, 4)):
        command = (
            "-m",
            "zero_launch",
            "--as-deepspeed",
            "--nproc",
            str(ranks),
            script,
            settings,
            "out",
            str(begin + 2),
        )
        printed = run(tmp_path, *command, named=False)
        assert f"begins at step {begin}" in printed, printed
        losses.append(final_loss(printed))
    assert losses[2] < losses[1] < losses[0]
