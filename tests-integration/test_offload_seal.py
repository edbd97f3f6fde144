"""Checkpoints from the NVMe tier: sealed files are linked, never written again, and load anywhere."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import training
from offload_runs import facts, start, tiers
from training import Run

from zero_ckpt import open_checkpoint, verify
from zero_comm import RanksFailedError, run_ranks

CASE = Run("plain", steps=6, dtype="bf16", clip=0.5)


def save_and_go_on(folder: str, zero: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The values when the checkpoint was taken, and after three more steps, with a second checkpoint in between."""
    engine = start(CASE, 3, zero)
    engine.save_checkpoint(folder, tag="untrained")
    training.train(engine, CASE, 0, 3)
    engine.save_checkpoint(folder, tag="first")
    taken = facts(engine)
    training.train(engine, CASE, 3, 5)
    engine.save_checkpoint(folder, tag="second")
    training.train(engine, CASE, 5, 6)
    last = facts(engine)
    engine.destroy()
    return taken, last


def loaded(folder: str, tag: str, zero: dict[str, Any], last: int) -> dict[str, bytes]:
    engine = start(CASE, 3, zero)
    engine.load_checkpoint(folder, tag)
    training.train(engine, CASE, engine.global_steps, last)
    result = facts(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("tier", "every"),
    [
        ("all nvme", False),
        pytest.param("nvme", True, marks=pytest.mark.soak),
        pytest.param("all nvme", True, marks=pytest.mark.soak),
    ],
)
def test_a_linked_checkpoint_survives_three_more_steps_and_loads_everywhere(
    tier: str, every: bool, tmp_path: Path
) -> None:
    drive, folder = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    zero = tiers(drive, 3)[tier]
    taken, last = run_ranks(save_and_go_on, 2, str(folder), zero)[0]
    for tag in ("untrained", "first", "second"):
        assert verify(folder / tag).ok
    for tag in ("first", "second"):
        tensors = open_checkpoint(folder, tag).tensors
        linked = {kind for (_, kind), entry in tensors.items() if any(not s.key for s in entry.slices)}
        assert linked == {"master", "exp_avg", "exp_avg_sq"} | ({"param"} if tier == "all nvme" else set())
        assert list((folder / tag).glob("*.extents"))
    everywhere = {"device": {}, **tiers(drive, 3)}
    chosen = zip((1, 2, 3, 4), everywhere, strict=True) if not every else itertools.product((1, 2, 3, 4), everywhere)
    for ranks, name in chosen:
        assert run_ranks(loaded, ranks, str(folder), "first", everywhere[name], 3)[0] == taken, (ranks, name)
    assert run_ranks(loaded, 2, str(folder), "second", zero, 6)[0] == last
    assert run_ranks(loaded, 2, str(folder), "untrained", zero, 3)[0] == taken


def crowded(drive: str) -> tuple[list[str], bool]:
    """A disk without room for a new generation refuses the checkpoint; training continues, and saves once there is."""
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": drive, "buffer_count": 3}}
    engine = start(CASE, 2, zero)
    training.train(engine, CASE, 0, 2)
    dist.barrier()
    filler = Path(drive) / "filler"
    if dist.get_rank() == 0:
        free = os.statvfs(drive).f_bavail * os.statvfs(drive).f_frsize
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - 4096)
    dist.barrier()
    said = []
    try:
        engine.save_checkpoint(f"{drive}/saved")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    if dist.get_rank() == 0:
        filler.unlink()
    dist.barrier()
    training.train(engine, CASE, 2, 4)
    saved = engine.save_checkpoint(f"{drive}/saved")
    engine.destroy()
    return said, saved


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_without_room_for_the_next_generation_refuses_the_checkpoint(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr!r}")
    try:
        for said, saved in run_ranks(crowded, 2, str(tmp_path)):
            assert saved
            assert len(said) == 1 and "CheckpointError" in said[0]
            assert "masters and states after this checkpoint" in said[0] and "short of" in said[0]
    except RanksFailedError as failure:
        raise AssertionError(str(failure)) from None
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


KILLED = """
import os, signal, sys, torch, zero_core
place = {"device": "nvme", "nvme_path": sys.argv[1]}
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
          "zero_optimization": {**zero, "offload_optimizer": place, "offload_param": place}}
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
engine = zero_core.initialize(model=model, config=config, device="cpu")[0]
for _ in range(2):
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[2])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_doctor_removes_what_a_rank_left_that_was_killed_after_a_save_and_the_checkpoints_stay(
    tmp_path: Path,
) -> None:
    drive, folder = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    command = [sys.executable, "-c", KILLED, str(drive), str(folder)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -9, killed.stderr
    assert list(drive.glob("*.index"))
    for words, status in (([], 1), (["--remove"], 0), ([], 0)):
        command = [sys.executable, "-m", "zero_launch", "doctor", "--swap", str(drive), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        assert ("nothing of a killed process" in done.stdout) == (not words and status == 0)
    assert {path.suffix for path in drive.iterdir()} == {".lock"}
    assert [verify(path).ok for path in sorted(folder.glob("global_step*"))] == [True, True]
