"""The configuration that `zero-plan fit --write` writes, trained with by this engine and by DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_comm import run_ranks
from zero_plan.cli import main

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
RANKS, STEPS = 2, 4
CASES = {
    "on the device": ("200 GB", "bf16"),
    "in float32": ("300 GB", "fp32"),
    "optimizer on the host": ("80 GB", "bf16"),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4))


def losses(engine: Any) -> list[float]:
    """Train for `STEPS` steps; return the loss of each micro-batch on this rank."""
    dtype, found = next(engine.module.parameters()).dtype, []
    for number in range(STEPS * engine.gradient_accumulation_steps()):
        torch.manual_seed(number * RANKS + dist.get_rank())
        given = torch.randn(engine.train_micro_batch_size_per_gpu(), 8).to(dtype)
        loss = (engine(given).float() - given[:, :4].float()).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def train(paths: list[str]) -> list[list[float]]:
    """Train with each configuration file by this engine; return this rank's losses, by file."""
    import zero_core

    found = []
    for path in paths:
        engine = zero_core.initialize(model=model(), config=path)[0]
        found.append(losses(engine))
        engine.destroy()
    return found


def train_with_deepspeed(paths: list[str]) -> list[list[float]]:
    """Train with each configuration file by DeepSpeed; return this rank's losses, by file.

    All in one call: DeepSpeed keeps its process groups for good, and those of a call of `run_ranks` end with it.
    """
    rank = str(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("DS_ACCELERATOR", "cpu"), ("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", RANKS)):
            patch.setenv(name, str(value))
        import deepspeed

        made = [model() for _ in paths]
        return [
            losses(deepspeed.initialize(model=module, model_parameters=module.parameters(), config=path)[0])
            for module, path in zip(made, paths, strict=True)
        ]


def write(case: str, written: Path) -> str:
    """Write the winner of a case to a file, with the Adam of torch, as DeepSpeed would have to compile its own."""
    memory, dtype = CASES[case]
    words = ["--shape", "llama-3-8b", "--sequence", "2048", "--machine", "h100-sxm-80gb-x8", "--train-batch", "16"]
    sizes = ["--set", f"device.memory={memory}", "--set", f"node.devices={RANKS}", "--dtype", dtype]
    assert main(["fit", *words, *sizes, "--write", str(written)]) == 0
    chosen = json.loads(written.read_text())
    assert ("offload_optimizer" in chosen["zero_optimization"]) == ("host" in case)
    chosen["optimizer"]["params"]["torch_adam"] = True
    written.write_text(json.dumps({**chosen, "zero_force_ds_cpu_optimizer": False}))
    return str(written)


def test_the_winner_trains_alike_with_this_engine_and_with_deepspeed(tmp_path: Path) -> None:
    paths = [write(case, tmp_path / f"{number}.json") for number, case in enumerate(CASES)]
    ours, theirs = (run_ranks(by, RANKS, paths) for by in (train, train_with_deepspeed))
    for number, (case, (_, dtype)) in enumerate(CASES.items()):
        for rank in range(RANKS):
            found, expected = ours[rank][number], theirs[rank][number]
            assert found == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 0.02), case
            assert found != pytest.approx(found[:1] * len(found), rel=1e-3), case
