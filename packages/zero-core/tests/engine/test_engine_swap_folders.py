"""A folder of `nvme_path` that does not exist is refused, not made on another drive."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zero_core
from zero_comm.testing import run_ranks


def opened(section: str, stage: int, path: str, create: bool) -> str:
    """What becomes of an engine whose files go to ``path``."""
    place = {"device": "nvme", "nvme_path": path}
    zero = {"stage": stage, **({} if section == "activations" else {section: place})}
    offload = {"create": create, **({"activations": place} if section == "activations" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "offload": offload,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    try:
        engine = zero_core.initialize(model=torch.nn.Linear(8, 8), config=config, device="cpu")[0]
    except zero_core.UsageError as error:
        return str(error)
    engine.destroy()
    return "opened"


def every(path: str, create: bool) -> list[str]:
    cases = [("offload_optimizer", 1), ("offload_optimizer", 3), ("offload_param", 3), ("activations", 0)]
    return [opened(section, stage, path, create) for section, stage in cases]


def built(path: str) -> str:
    place = {"device": "nvme", "nvme_path": path}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "offload_param": place}}
    try:
        with zero_core.Init(config=config):
            torch.nn.Linear(8, 8)
    except zero_core.UsageError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_missing_swap_folder_is_refused_with_the_nearest_that_exists(tmp_path: Path, world_size: int) -> None:
    pytest.importorskip("zero_nvme_aio")
    path = tmp_path / "drive" / "swap"
    for messages in run_ranks(every, world_size, str(path), False):
        for message in messages:
            assert f"there is no folder '{path}'; the nearest that exists is '{tmp_path}'" in message
            assert "nvme_path: " in message and '"create": true' in message
    assert not path.parent.exists()
    if world_size == 1:
        assert f"there is no folder '{path}'" in run_ranks(built, 1, str(path))[0]
        assert not path.parent.exists()
    assert run_ranks(every, world_size, str(path), True) == [["opened"] * 4] * world_size


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_swap_folder_that_cannot_be_reached_is_refused_with_the_reason(
    tmp_path: Path, world_size: int, create: bool
) -> None:
    pytest.importorskip("zero_nvme_aio")
    (tmp_path / "loop").symlink_to("loop")
    reasons = {
        "x" * 300: "File name too long",
        "y/" * 3000: "File name too long",
        "loop": "Too many levels of symbolic",
    }
    for name, reason in reasons.items():
        for messages in run_ranks(every, world_size, str(tmp_path / name), create):
            for message in messages:
                assert "nvme_path: cannot use the folder" in message and reason in message
                assert len(message) < 400
    assert reasons["loop"] in run_ranks(built, 1, str(tmp_path / "loop"))[0]


def dies(path: str) -> None:
    """Train and seal, and leave the files that a killed process would."""
    place = {"device": "nvme", "nvme_path": path}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": place, "offload_param": place},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = zero_core.initialize(model=torch.nn.Linear(64, 64), config=config, device="cpu")[0]
    for number in range(2):
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
        if number == 0:
            engine.save_checkpoint(f"{path}/ckpt")
    own = f".rank{torch.distributed.get_rank()}.g"
    for name in [name for name in os.listdir(path) if own in name]:
        os.link(f"{path}/{name}", f"{path}/left-{name}")
    torch.distributed.barrier()
    engine.destroy()


def starts_smaller(path: str) -> list[str]:
    for name in os.listdir(path):
        if name.startswith("left-"):
            os.rename(f"{path}/{name}", f"{path}/{name.removeprefix('left-')}")
    before = sorted(name for name in os.listdir(path) if ".rank1." in name and ".g" in name)
    assert before and opened("offload_optimizer", 1, path, False) == "opened"
    return sorted(name for name in os.listdir(path) if ".g" in name)


def test_a_smaller_restart_removes_the_swap_files_of_ranks_that_are_gone(tmp_path: Path) -> None:
    pytest.importorskip("zero_nvme_aio")
    run_ranks(dies, 2, str(tmp_path))
    other = tmp_path / "notes.rank7.g1.index"
    other.write_text("somebody else's")
    left = run_ranks(starts_smaller, 1, str(tmp_path))[0]
    assert not [name for name in left if ".rank1." in name], left
    assert other.read_text() == "somebody else's"
    assert (tmp_path / "ckpt" / "latest").exists()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "drive"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    "left", ["optimizer.rank0", "optimizer.rank0-gradients", "parked.rank7", "parked.rank7-gradients"]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_drive_that_is_full_of_a_killed_runs_swap_files_has_room(drive: Path, world_size: int, left: str) -> None:
    pytest.importorskip("zero_nvme_aio")
    (drive / f"{left}.lock").touch()
    with open(drive / f"{left}.g000001.s0.extents", "ab", buffering=0) as file:
        with pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
    assert run_ranks(opened, world_size, "offload_optimizer", 1, str(drive), False) == ["opened"] * world_size
