"""Real DeepSpeed checkpoints convert to exactly what DeepSpeed extracts, and it goes on from what is exported to it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zero_ckpt import convert  # noqa: E402
from zero_ckpt.zero_to_fp32 import (  # noqa: E402
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
JOB = Path(__file__).with_name("deepspeed_job.py")


def run(world_size: int, *arguments: str, steps: int = 2) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "STEPS": str(steps)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    done = subprocess.run(
        [*command, str(JOB), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


CASES = [(1, "bf16", 2), (2, "fp32", 2), (3, "bf16", 2), (3, "fp32", 4)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("stage", "dtype", "world_size"), CASES)
def test_a_checkpoint_converts_to_what_deepspeed_extracts(
    tmp_path: Path, stage: int, dtype: str, world_size: int
) -> None:
    run(world_size, "save", str(tmp_path), str(stage), dtype, "2")
    expected = load(tmp_path / "expected.pt")
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ds"))
    for name, value in expected.items():
        assert torch.equal(state[name], value.float() if value.is_floating_point() else value), name
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    extra = {"frozen.weight", "frozen.bias"} if stage == 1 else set()  # DeepSpeed leaves them out at stage 1
    assert set(state) == set(expected) | extra
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "ds"), str(tmp_path / "out"), max_shard_size=None)
    converted = load(tmp_path / "out" / "pytorch_model.bin")
    assert all(torch.equal(converted[name], value) for name, value in state.items())


@pytest.mark.timeout(240)
def test_deepspeed_goes_on_from_what_is_exported(tmp_path: Path) -> None:
    run(2, "save", str(tmp_path), "2", "fp32", "2")
    convert(tmp_path / "ds", tmp_path / "ours", to="zero-ckpt")
    (universal,) = convert(tmp_path / "ours", tmp_path / "universal", to="deepspeed-universal")
    expected, following = load(tmp_path / "expected.pt"), load(tmp_path / "next.pt")
    for stage, world_size in ((1, 2), (3, 2)):
        run(world_size, "resume", str(tmp_path), str(stage), "fp32", str(universal))
        resumed = load(tmp_path / "resumed.pt")
        for name, value in resumed["loaded"].items():
            assert torch.equal(value, expected[name]), name
        if stage == 1:
            assert all(torch.equal(resumed["after"][name], value) for name, value in following.items())
