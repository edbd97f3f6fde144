"""What the workers of the Ray tests run, and the same by zero-launch.

Arguments: JSON of the loop's configuration, folder of the checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import _elastic_training
import torch

import zero_core

STEPS, EVERY = 9, 3


def loop(given: dict[str, Any], checkpoints: str) -> None:
    """Train to step 9; where `dies_at` says so, rank 1 dies in the first attempt."""
    settings = _elastic_training.config({"zero_optimization": {"stage": given["stage"], "unit_min_numel": 1}})
    model, data = _elastic_training.model(), _elastic_training.data()
    engine, _, loader, _ = zero_core.initialize(model=model, training_data=data, config=settings)
    resumed = engine.resume(checkpoints)
    batches = iter(zero_core.RepeatingLoader(loader))
    while engine.global_steps < STEPS:
        batch = next(batches)
        loss = (engine(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        engine.backward(loss)
        if resumed is None and engine.global_steps == given.get("dies_at") and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        engine.step()
        tell(Path(checkpoints), engine.global_steps, loss.item(), None if resumed is None else resumed.step)
        if engine.global_steps % EVERY == 0:
            engine.save_checkpoint(checkpoints)
    engine.destroy()


def tell(folder: Path, step: int, loss: float, resumed: int | None) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with open(folder.parent / f"{folder.name}.losses", "a") as file:
        file.write(json.dumps([step, rank, world, repr(loss), resumed]) + "\n")


if __name__ == "__main__":
    loop(json.loads(sys.argv[1]), sys.argv[2])
