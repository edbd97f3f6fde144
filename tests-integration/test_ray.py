"""Ray Train's workers train with the engine as zero-launch's ranks do, and continue when one of them dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _ray_training
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `nox -s ray` has it")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster on this machine: two processors, an object store of 100 MB."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{before}"
    ray.init(num_cpus=3, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    os.environ["PYTHONPATH"] = before


def told(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder.parent / f"{folder.name}.losses").read_text().splitlines()]


def by_step(rows: list[Any]) -> dict[tuple[int, int], str]:
    """(step, rank): loss; of steps that were repeated, the last."""
    return {(step, rank): loss for step, rank, _, loss, _ in rows}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_worker_that_dies_is_started_again_and_the_losses_are_those_of_zero_launch(
    stage: int, cluster: None, tmp_path: Path
) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from zero_launch.ray import torch_trainer

    plain, folder = tmp_path / "plain", tmp_path / "ray"
    words = ["--nproc", "2", str(HERE / "_ray_training.py"), json.dumps({"stage": stage}), str(plain)]
    done = subprocess.run([sys.executable, "-m", "zero_launch", *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = torch_trainer(
        _ray_training.loop,
        {"stage": stage, "dies_at": 4},
        checkpoints=folder,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=f"stage{stage}", storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.error is None
    rows = told(folder)
    assert {world for _, _, world, _, _ in rows} == {2}
    assert {resumed for *_, resumed in rows} == {None, 3}  # the first attempt died in step 5, after the save of step 3
    assert [step for step, rank, *_ in rows if rank == 0] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    assert by_step(rows) == by_step(told(plain))


def test_a_folder_that_is_not_absolute_is_refused() -> None:
    from zero_launch.ray import torch_trainer

    with pytest.raises(ValueError, match="absolute path that all workers see"):
        torch_trainer(_ray_training.loop, checkpoints="checkpoints")
