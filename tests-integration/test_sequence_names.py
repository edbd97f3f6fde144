"""DeepSpeed's names for Ulysses: Trainer, Accelerate and scripts over ranks that share sequences follow one process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
SCRIPT = Path(__file__).with_name("_sequence_training.py")
TWO_RANKS = ("-m", "zero_launch", "--as-deepspeed", "--nproc", "2")
SOAK = pytest.mark.soak


def run(folder: Path, kind: str, stage: int) -> dict[str, Any]:
    """What the script found in one process (`alone`) or on two ranks."""
    command = [sys.executable, *(() if kind == "alone" else TWO_RANKS), str(SCRIPT), kind, str(stage), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.partition("found ")[2].splitlines()[0])
    return found


@functools.cache
def alone(folder: Path) -> dict[str, Any]:
    return run(folder, "alone", 0)


@pytest.mark.parametrize("kind", ("trainer", "accelerate", "registered"))
@pytest.mark.parametrize("stage", (pytest.param(0, marks=SOAK), pytest.param(2, marks=SOAK), 3))
def test_ranks_that_share_sequences_follow_one_process(
    kind: str, stage: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = alone(tmp_path_factory.getbasetemp())
    found = run(tmp_path, kind, stage)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-5)
    assert expected["losses"][-1] < expected["losses"][0]
