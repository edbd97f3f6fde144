"""`nvme_path` with several directories: the bits of one, a drive that fails or is full, other directories later."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import training
import zoo
from offload_runs import facts, start
from training import Run

from zero_comm import run_ranks
from zero_nvme_aio.extents import _transfer

CASE = Run("plain", steps=6, dtype="bf16", clip=0.5)


def on(paths: list[str] | str, **more: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": paths, "buffer_count": 3, **more}
    return {"offload_optimizer": place, "offload_param": place}


def kept(zero: dict[str, Any], stage: int) -> dict[str, Any]:
    """``zero`` without the offload that a stage does not have."""
    return zero if stage == 3 else {"offload_optimizer": zero["offload_optimizer"]}


def through(zero: dict[str, Any], stage: int) -> dict[str, bytes]:
    engine = start(CASE, stage, kept(zero, stage))
    training.train(engine, CASE, 0, CASE.steps)
    result = facts(engine)
    engine.destroy()
    return result


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    made = [tmp_path / name for name in ("first", "second", "third")]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


def mounted(commands: list[list[str]], place: Path) -> Iterator[str]:
    place.mkdir()
    for command in commands:
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip(f"needs root and {' '.join(command)}")
    yield str(place)
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[str]:
    """An ext4 file system of its own, of 64 MiB."""
    image, place = tmp_path / "image", tmp_path / "drive"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    yield from mounted([["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]], place)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """A file system with room for few of the states."""
    place = tmp_path / "small"
    yield from mounted([["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(place)]], place)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_several_paths_give_the_bits_of_one(folders: list[str], world_size: int, stage: int) -> None:
    expected = run_ranks(through, world_size, on(folders[0]), stage)
    for weights in (None, [5, 1, 2]):
        assert run_ranks(through, world_size, on(folders, nvme_path_weights=weights), stage) == expected


def said_of_activations(folders: list[str], weights: list[int]) -> str:
    """What a run says of where its activations go."""
    place = {"device": "nvme", "nvme_path": folders, "nvme_path_weights": weights}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = start(CASE, 2, {}, offload={"activations": place})
        engine.backward(sum(engine(*zoo.batch(0, 0, 0, 1))))
        engine.step()
    engine.destroy()
    return said.getvalue()


def test_activations_are_shared_by_the_weights(folders: list[str]) -> None:
    said = run_ranks(said_of_activations, 1, folders[:2], [9, 1])[0]
    assert f"offload.activations.nvme_path: 90% of the bytes to '{folders[0]}', 10% of the bytes" in said


def aborted_at(
    drive: str, zero: dict[str, Any], step: int, saves: str | None = None
) -> tuple[dict[str, bytes], list[str]]:
    """Train while the file system of ``drive`` takes no more writes from ``step`` on; save before, and after each step
    from then on, into the folder ``saves``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start(CASE, 3, zero)
        training.train(engine, CASE, 0, step)
        if saves is not None:
            engine.save_checkpoint(saves)
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["mount", "-o", "remount,abort", drive], check=True)
        dist.barrier()
        for number in range(step, CASE.steps):
            training.train(engine, CASE, number, number + 1)
            if saves is not None:
                engine.save_checkpoint(saves)
        result = facts(engine)
        engine.destroy()
    return result, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_goes_on_when_a_drive_takes_no_more_writes(folders: list[str], drive: str, world_size: int) -> None:
    expected = run_ranks(through, world_size, on(folders[0]), 3)
    found = run_ranks(aborted_at, world_size, drive, on([folders[0], drive]), 3)
    for (result, said), wanted in zip(found, expected, strict=True):
        assert result == wanted
        named = [text for text in said if f"the path '{drive}' (zero_optimization.offload_" in text]
        assert any("offload_optimizer.nvme_path[1]) of a store failed" in text for text in named), said
        assert any("offload_param.nvme_path[1]) of a store failed" in text for text in named), said
        assert len(named) == len({text.split(":")[0] for text in named}), named  # once for each store
        assert all("Read-only file system" in text for text in named), named


def frozen_at(drive: str, zero: dict[str, Any], step: int) -> tuple[dict[str, bytes], list[str]]:
    """Train while the file system of ``drive`` does not answer from ``step`` on, until that is said."""
    seconds, _transfer.SILENT_SECONDS = _transfer.SILENT_SECONDS, 0.2
    said: list[str] = []
    heard = threading.Event()

    def hear(message: Warning | str, *_: Any, **__: Any) -> None:
        said.append(str(message))
        if "has not answered" in said[-1]:
            heard.set()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        engine = start(CASE, 3, zero)
        training.train(engine, CASE, 0, step)
        subprocess.run(["fsfreeze", "--freeze", drive], check=True)
        thaw = threading.Thread(target=lambda: (heard.wait(60), subprocess.run(["fsfreeze", "--unfreeze", drive])))
        thaw.start()
        training.train(engine, CASE, step, CASE.steps)
        thaw.join()
        _transfer.SILENT_SECONDS = seconds
        result = facts(engine)
        engine.destroy()
    return result, said


def test_a_run_waits_for_a_drive_that_does_not_answer_and_names_it(folders: list[str], drive: str) -> None:
    if shutil.which("fsfreeze") is None:
        pytest.skip("needs fsfreeze")
    expected = run_ranks(through, 1, on(folders[0]), 3)
    ((result, said),) = run_ranks(frozen_at, 1, drive, on([folders[0], drive]), 3)
    assert result == expected[0]
    assert any(f"the path '{drive}' (zero_optimization.offload_" in text for text in said), said
    assert all("has not answered for" in text for text in said if drive in text), said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_saves_goes_on_when_a_drive_takes_no_more_writes_and_resumes(
    folders: list[str], drive: str, tmp_path: Path, world_size: int
) -> None:
    expected = run_ranks(through, world_size, on(folders[0]), 3)
    saves = str(tmp_path / "checkpoint")
    for (result, _), wanted in zip(
        run_ranks(aborted_at, world_size, drive, on([drive, folders[0]]), 3, saves), expected, strict=True
    ):
        assert result == wanted
    assert run_ranks(resumed, world_size, on(folders[1]), saves) == expected


def test_a_run_goes_on_when_a_drive_is_full(folders: list[str], small: str) -> None:
    expected = run_ranks(through, 2, on(folders[0]), 2)
    zero = on([small, folders[0]], nvme_path_weights=[1, 1])
    assert run_ranks(through, 2, zero, 2) == expected


def saved(zero: dict[str, Any], folder: str) -> None:
    engine = start(CASE, 3, zero)
    training.train(engine, CASE, 0, 2)
    engine.save_checkpoint(folder)
    training.train(engine, CASE, 2, 3)
    engine.destroy()


def resumed(zero: dict[str, Any], folder: str) -> dict[str, bytes]:
    engine = start(CASE, 3, zero)
    engine.load_checkpoint(folder)
    training.train(engine, CASE, engine.global_steps, CASE.steps)
    result = facts(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (2, 3)])
def test_a_run_resumes_with_another_number_of_paths(
    folders: list[str], tmp_path: Path, before: int, after: int
) -> None:
    expected = run_ranks(through, 2, on(folders[0]), 3)
    folder = str(tmp_path / "checkpoint")
    run_ranks(saved, 2, on(folders[:before]), folder)
    assert run_ranks(resumed, 2, on(folders[-after:]), folder) == expected
