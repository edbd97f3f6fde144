"""The engine draws nothing from the script's random generators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import random, sys
import numpy
import torch
import torch.distributed as dist
from torch import nn
import zero_core

stage, tier, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
zero = {"stage": stage}
if tier != "device":
    zero["offload_optimizer"] = {"device": tier, "nvme_path": folder}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": zero,
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    "steps_per_print": 1,
}


def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def check(what):
    assert states() == before, what


before = states()
with zero_core.Init(config):
    check("Init")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
before = states()
engine = zero_core.initialize(model=model, config=config)[0]
check("initialize")
for step in range(2):
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).square().mean())
    engine.step()
    check(f"step {step}")
engine.save_checkpoint(folder)
engine.full_param(model[0].weight)
check("save and read")
engine.destroy()
"""


@pytest.mark.parametrize(("stage", "tier"), [(0, "device"), (3, "nvme")])
def test_a_fresh_process_has_the_random_numbers_that_it_has_without_the_engine(
    stage: int, tier: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(stage), tier, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
