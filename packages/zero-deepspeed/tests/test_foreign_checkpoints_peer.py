"""Checkpoints of DeepSpeed load directly, at one, two and three ranks, and training continues as DeepSpeed's own does.

DeepSpeed writes every checkpoint in one start of two ranks, as importing it takes longest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_deepspeed

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(900),
]
SCRIPT = Path(__file__).with_name("peer_checkpoint_job.py")
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2, "hysteresis": 1}},
}
CASES = {
    f"{stage}-{dtype}": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **half}
    for stage in (1, 2, 3)
    for dtype, half in DTYPES.items()
}
CASES["2-fp32-offload"] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
CASES["3-bf16-small-groups"] = {"zero_optimization": {"stage": 3, "sub_group_size": 40}, **DTYPES["bf16"]}
UNIVERSAL = ("2-bf16", "3-fp32")
SAVED, LAST = 3, 5


def environment(ours: bool) -> dict[str, str]:
    entry = str(zero_deepspeed.path())
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != entry]
    path = os.pathsep.join([entry, *parts] if ours else parts)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def run(ours: bool, ranks: int, folder: Path, jobs: list[dict[str, Any]]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(SCRIPT)]
    command += [str(folder), json.dumps(jobs)]
    done = subprocess.run(command, env=environment(ours), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with DeepSpeed's checkpoint of each case, and what it had then and after."""
    folder = tmp_path_factory.mktemp("theirs")
    save = {"first": 0, "last": LAST, "save_at": SAVED}
    run(False, 2, folder, [{"name": n, "config": c, "save": str(folder / n), **save} for n, c in CASES.items()])
    for name in UNIVERSAL:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += [f"--input_folder={folder / name / 'global_step3'}"]
        command += [f"--output_folder={folder / f'{name}-universal' / 'global_step3'}"]
        done = subprocess.run(command, env=environment(False), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


def load(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=False)  # written by this test's own jobs
    return found


@pytest.mark.parametrize("ranks", (2, 1, 3))
def test_what_deepspeed_saved_continues_here(ranks: int, theirs: Path, tmp_path: Path) -> None:
    jobs = [{"name": name, "config": config, "load": str(theirs / name)} for name, config in CASES.items()]
    for name in UNIVERSAL:
        config = {**CASES[name], "checkpoint": {"load_universal": True}}
        place = {"load": str(theirs / f"{name}-universal"), "tag": "global_step3"}
        jobs.append({"name": f"{name}-universal", "config": config, **place})
    run(True, ranks, tmp_path, [{**job, "first": SAVED, "last": LAST, "seed": 5} for job in jobs])
    for job in jobs:
        name = str(job["name"])
        expected, found = load(theirs, name.removesuffix("-universal")), load(tmp_path, name)
        facts = {key: expected["saved"].pop("facts") for key in ("facts",)}["facts"]
        assert found["before"].pop("facts") == facts, name
        moments = {key for key in found["before"] if key.endswith((" exp_avg", " exp_avg_sq"))}
        assert expected["saved"].keys() == found["before"].keys() - moments
        assert [key for key, value in expected["saved"].items() if not torch.equal(value, found["before"][key])] == []
        assert found["client"]["pair"] == (1, "two") and found["client"]["milestones"] == {10: "a"}
        assert torch.equal(found["client"]["best"], torch.tensor([1.5, 2.5]))
        check_continuation(name, ranks, expected, found)


def check_continuation(name: str, ranks: int, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """In float32 to the last bits; in 16 bits as near as two ways of averaging 16-bit gradients come."""
    exact = "fp32" in name
    losses = zip(expected["losses"][SAVED:], found["losses"], strict=True)
    assert max(abs(a - b) / abs(a) for a, b in losses) <= (2e-7 if exact else 2e-3), name
    for key, value in expected["after"].items():
        if key != "facts":
            moved = float((value.double() - expected["saved"][key].double()).abs().max())
            near = float((value.double() - found["after"][key].double()).abs().max())
            assert near <= (2e-7 if exact else max(moved / 4, 1e-6)), (name, ranks, key)
