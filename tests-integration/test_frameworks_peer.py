"""The same script, once with DeepSpeed and once with its names answered here: losses, norms, rates, weights, resuming.

Float32 on the CPU; Trainer and Accelerate know one process there, plain scripts run on two ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file

import zero_deepspeed

SCRIPT = Path(__file__).parent / "_frameworks_training.py"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
STAGES = [(stage, where) for stage in range(4) for where in ("device", "offload") if (stage, where) != (0, "offload")]


def run(ours: bool, kind: str, stage: int, where: str, folder: Path) -> dict[str, Any]:
    """Train in ``folder`` and return what was seen."""
    entry = str(zero_deepspeed.path())
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != entry]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([entry, *parts] if ours else parts),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable]
    if kind.startswith(("trainer", "accelerate")):
        environment.update(ALONE)
    else:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPT), kind, str(stage), where, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


def farthest(ours: list[float], theirs: list[float | None]) -> float:
    """The largest relative difference to what they know: DeepSpeed has no norm at stage 0."""
    known = [(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None]
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in known), default=0.0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.peer
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed beside it")
@pytest.mark.parametrize("kind", ("trainer", "trainer-ds", "accelerate", "plain", "pretrained"))
@pytest.mark.parametrize("stage, where", STAGES)
def test_deepspeed_and_this_project_see_the_same(kind: str, stage: int, where: str, tmp_path: Path) -> None:
    seen = {}
    for ours in (True, False):
        folder = tmp_path / ("ours" if ours else "theirs")
        if kind == "pretrained":
            from _frameworks_training import build

            build().save_pretrained(folder / "pretrained", max_shard_size="50KB")
        seen[ours] = run(ours, kind, stage, where, folder)
    assert farthest(seen[True]["losses"], seen[False]["losses"]) <= 1e-5
    assert farthest(seen[True]["norms"], seen[False]["norms"]) <= 1e-4
    assert seen[True].get("resumed exactly", True)
    assert farthest(seen[True]["rates"], seen[False]["rates"]) <= 1e-12
    ours, theirs = weights(tmp_path / "ours"), weights(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5) for name in ours)
    assert seen[True].get("generated") == seen[False].get("generated")


@pytest.mark.soak
@pytest.mark.parametrize("stage", (0, 3))
def test_trainer_resumes_exactly(stage: int, tmp_path: Path) -> None:
    whole = run(True, "trainer-ds", stage, "device", tmp_path / "whole")
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-15", tmp_path / "again" / "checkpoint-15")
    resumed = run(True, "trainer-ds", stage, "device", tmp_path / "again")
    assert resumed == whole
    ours, again = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert all(torch.equal(ours[name], again[name]) for name in ours)
