"""Commands that take long show on a terminal that they run, and are quiet elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import torch, zero_core
model = torch.nn.Linear(8, 8)
engine, *_ = zero_core.initialize(model=model, config="ds.json")
while True:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
"""
SIZES = ["--shape", "llama-3-8b", "--machine", "h100-sxm-80gb-x8"]
COMMANDS = {
    "estimate": ["estimate", *SIZES],
    "fit": ["fit", *SIZES, "--train-batch", "64"],
    "run train.py": ["run", "train.py", "--world-size", "2"],
    "build torch.nn:Transformer": ["table", "--model", "torch.nn:Transformer", "--stage", "2"],
    "model config.json": "model --hf-config config.json --config ds.json --batch 1x8 --world-size 2".split(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, a model of Transformers and a configuration."""
    (tmp_path / "train.py").write_text(SCRIPT)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    )
    return tmp_path


@pytest.mark.parametrize("title", COMMANDS)
def test_a_terminal_shows_what_runs_and_a_pipe_does_not(
    folder: Path, title: str, read_terminal: Callable[[int], bytes]
) -> None:
    command = [sys.executable, "-m", "zero_plan", *COMMANDS[title]]
    quiet = subprocess.run(command, cwd=folder, capture_output=True)
    assert title.encode() not in quiet.stderr, quiet.stderr
    ours, theirs = os.openpty()
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(command, cwd=folder, stderr=theirs, stdout=output)
    os.close(theirs)
    text = read_terminal(ours)
    status = job.wait()
    assert status == quiet.returncode and status in (0, 1) and title.encode() in text, (quiet.stderr, text)
    assert (folder / "output").read_bytes() == quiet.stdout
