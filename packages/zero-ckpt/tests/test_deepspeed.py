"""Real DeepSpeed checkpoints convert to exactly what DeepSpeed extracts, and it continues from what is exported to
it."""

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
from zero_ckpt.conversion import open_source  # noqa: E402
from zero_ckpt.types import numel  # noqa: E402
from zero_ckpt.zero_to_fp32 import (  # noqa: E402
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
JOB = Path(__file__).with_name("deepspeed_job.py")


def run(world_size: int, *arguments: str, groups: int = 2) -> None:
    job = {"STEPS": "2", "PARAM_GROUPS": str(groups)}
    environment = {**os.environ, **job, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    done = subprocess.run(
        [*command, str(JOB), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def same(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names whose values are not those that DeepSpeed extracted, as fp32."""
    return [
        name
        for name, value in expected.items()
        if not torch.equal(state[name], value.float() if value.is_floating_point() else value)
    ]


EVERY_DAY = [(1, "bf16", 2), (2, "fp32", 2), (3, "bf16", 2), (3, "fp32", 4)]
CASES = [
    pytest.param(stage, dtype, size, marks=[] if (stage, dtype, size) in EVERY_DAY else pytest.mark.soak)
    for stage in (1, 2, 3)
    for dtype in ("fp32", "bf16")
    for size in (2, 4)
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("stage", "dtype", "world_size"), CASES)
def test_a_checkpoint_converts_to_what_deepspeed_extracts(
    tmp_path: Path, stage: int, dtype: str, world_size: int
) -> None:
    run(world_size, "save", str(tmp_path), str(stage), dtype, "2")
    expected = load(tmp_path / "expected.pt")
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ds"))
    assert not same(state, expected)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    extra = {"frozen.weight", "frozen.bias"} if stage == 1 else set()  # DeepSpeed leaves them out at stage 1
    assert set(state) == set(expected) | extra
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "ds"), str(tmp_path / "out"), max_shard_size=None)
    converted = load(tmp_path / "out" / "pytorch_model.bin")
    assert all(torch.equal(converted[name], value) for name, value in state.items())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.soak)])
@pytest.mark.parametrize("stage", [1, *(pytest.param(other, marks=pytest.mark.soak) for other in (2, 3))])
def test_a_universal_checkpoint_of_deepspeed_holds_what_the_original_does(
    tmp_path: Path, stage: int, dtype: str
) -> None:
    run(2, "save", str(tmp_path), str(stage), dtype, "2")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += [f"--input_folder={tmp_path / 'ds' / 'tag1'}", f"--output_folder={tmp_path / 'universal' / 'tag1'}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "universal"), tag="tag1")
    assert not same(state, load(tmp_path / "expected.pt"))
    original, universal = (open_source(tmp_path / name / "tag1") for name in ("ds", "universal"))
    moments = [key for key in original.tensors if key[1] in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 12
    for key in moments:
        pair = [bytearray(4 * numel(tuple(original.tensors[key].shape))) for _ in range(2)]
        original.read_into(*key, 0, pair[0])
        universal.read_into(*key, 0, pair[1])
        assert pair[0] == pair[1], key


def resume(
    tmp_path: Path, world_size: int, stage: int, dtype: str, universal: Path, groups: int
) -> dict[str, dict[str, Any]]:
    """What DeepSpeed loads from a universal checkpoint, and what it has after the next step."""
    run(world_size, "resume", str(tmp_path), str(stage), dtype, str(universal), groups=groups)
    found: dict[str, dict[str, Any]] = load(tmp_path / "resumed.pt")
    return found


# At stage 3 DeepSpeed gives all groups one and the same step tensor, which each of them then advances.
GROUPS = {1: 2, 2: 2, 3: 1}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
@pytest.mark.parametrize("saved", [2, pytest.param(1, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_deepspeed_goes_on_from_what_is_exported(tmp_path: Path, saved: int, dtype: str) -> None:
    run(2, "save", str(tmp_path), str(saved), dtype, "2", groups=GROUPS[saved])
    convert(tmp_path / "ds", tmp_path / "ours", to="zero-ckpt")
    (universal,) = convert(tmp_path / "ours", tmp_path / "universal", to="deepspeed-universal")
    expected, following = load(tmp_path / "expected.pt"), load(tmp_path / "next.pt")
    for stage in (1, 3):
        resumed = resume(tmp_path, 2, stage, dtype, universal, GROUPS[saved])
        assert not same(expected, resumed["loaded"])
        if GROUPS[saved] > GROUPS[stage]:
            continue
        if dtype == "bf16" and (saved == 3) != (stage == 3):  # its stages average 16-bit gradients differently
            moved = max(float((following[name] - expected[name]).abs().max()) for name in following)
            for name, value in following.items():
                torch.testing.assert_close(resumed["after"][name], value, rtol=0, atol=moved / 64)
        else:
            assert not same(following, resumed["after"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", [2, *(pytest.param(other, marks=pytest.mark.soak) for other in (1, 3))])
def test_deepspeed_goes_on_from_a_run_without_it(tmp_path: Path, stage: int) -> None:
    run(1, "plain", str(tmp_path), "0", "fp32", "2", groups=GROUPS[stage])
    (universal,) = convert(tmp_path / "ours", tmp_path / "universal", to="deepspeed-universal")
    expected, following = load(tmp_path / "expected.pt"), load(tmp_path / "next.pt")
    resumed = resume(tmp_path, 1, stage, "fp32", universal, GROUPS[stage])
    assert not same(expected, resumed["loaded"]) and "unused.weight" in resumed["loaded"]
    for name, value in resumed["after"].items():
        if name.startswith("unused"):  # torch skips what has no gradient, DeepSpeed takes it as zero and decays
            continue
        torch.testing.assert_close(value, following[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(value, expected[name])
