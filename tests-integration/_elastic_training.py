"""What ranks of the elastic tests run: a training of a user's, and accidents.

Arguments: number of steps (0: see `last_step`), folder for checkpoints, JSON of configuration keys, and accidents as
`KIND:ROUND:RANK:STEP`, where KIND is `rank` (the rank is killed) or `host` (its host's agent is). Rank 0 appends a line
for each step to a file beside the folder: step, ranks, samples, loss of its first micro-batch, time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import zero_core

EVERY = int(os.environ.get("ELASTIC_EVERY", "3"))  # steps between two checkpoints on disk
STANDBY = "zero-standby"
PACE = float(os.environ.get("ELASTIC_PACE", "0"))  # seconds a step


def model() -> nn.Module:
    torch.manual_seed(7)
    layers = [layer for _ in range(3) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(nn.Linear(12, 24), *layers, nn.Linear(24, 1))


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(60, 12, generator=generator))


def config(changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
        **changes,
    }


def train(steps: int, folder: Path, changes: dict[str, Any], accidents: list[str]) -> None:
    engine, _, loader, _ = zero_core.initialize(model=model(), training_data=data(), config=config(changes))
    engine.resume(folder)
    tell_parent(folder)
    batches = iter(zero_core.RepeatingLoader(loader))
    last = last_step(steps, engine, accidents)
    while engine.global_steps < last:
        before, losses = engine.global_steps, []
        while engine.global_steps == before:
            batch = next(batches)
            loss = (engine(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
            engine.backward(loss)
            losses.append(loss.item())
            have_accidents(accidents, before)
            engine.step()
        time.sleep(0.1 if last == sys.maxsize else PACE)
        tell(folder, engine, losses[0])
        if engine.global_steps % EVERY == 0:
            engine.save_checkpoint(folder)
    engine.destroy()


def last_step(steps: int, engine: Any, accidents: list[str]) -> int:
    """Where this round ends. With 0 steps, a little after the hosts that accidents took have come back."""
    grown = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 2 * len(accidents)
    return steps or (engine.global_steps + 2 * EVERY if grown else sys.maxsize)


def have_accidents(accidents: list[str], step: int) -> None:
    here = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("RANK"), str(step)
    for kind, *where in (accident.split(":") for accident in accidents):
        if here == tuple(where):
            if kind == "host":
                await_standby()
            os.kill(os.getppid() if kind == "host" else os.getpid(), signal.SIGKILL)
            time.sleep(60)


def await_standby() -> None:
    """Wait until this host's agent has begun a standby, and so has told the launcher what ranks import."""
    while not any(child.name() == STANDBY for child in psutil.Process(os.getppid()).children()):
        time.sleep(0.05)


def tell_parent(folder: Path) -> None:
    """Write down what this rank's process comes from: a standby, or the agent."""
    attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("RANK")
    (folder.parent / f"{folder.name}.parent.{attempt}.{rank}").write_text(psutil.Process(os.getppid()).name())


def tell(folder: Path, engine: Any, loss: float) -> None:
    if torch.distributed.get_rank() == 0:
        world = torch.distributed.get_world_size()
        with open(folder.parent / f"{folder.name}.losses", "a") as file:
            file.write(f"{engine.global_steps} {world} {engine.global_samples} {loss!r} {time.time()}\n")


def main() -> None:
    steps, folder, changes, *accidents = sys.argv[1:]
    train(int(steps), Path(folder), json.loads(changes), accidents)


if __name__ == "__main__":
    main()
