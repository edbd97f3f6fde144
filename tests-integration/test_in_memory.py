"""A lost rank or node continues, to the bit, from the copies in the nodes' memory; a second one from the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import training
from training import Run

from zero_ckpt.torch import node_memory_folder
from zero_comm import run_ranks
from zero_core import UsageError

EVERY, STEPS, LAST = 2, 5, 8
OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}


def start(run: Run, stage: int, zero: dict[str, Any], path: str | None = "memory") -> Any:
    """An engine whose nodes' memory is the folder ``path`` below each rank's working directory; the default if None."""
    import torch
    import zoo

    import zero_core

    model = zoo.build(run.variant, training.DTYPES["fp32" if run.dtype == "bf16" else run.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    config = training.config(run, stage, dist.get_world_size(), **zero)
    config["checkpoint"] = {"in_memory": {"every": EVERY} if path is None else {"every": EVERY, "path": path}}
    return zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]


def enter_node(root: Path, per_node: int) -> None:
    node = root / f"node{dist.get_rank() // per_node}"
    node.mkdir(exist_ok=True)
    os.chdir(node)


def trains(root: Path, run: Run, stage: int, zero: dict[str, Any], per_node: int, save_at: int | None) -> None:
    """Steps before the accident; with ``save_at`` a checkpoint on disk too."""
    enter_node(root, per_node)
    engine = start(run, stage, zero)
    for step in range(STEPS):
        training.train(engine, run, step, step + 1)
        if step + 1 == save_at:
            engine.save_checkpoint(root / "disk")
    engine.destroy()


def goes_on(
    root: Path, run: Run, stage: int, zero: dict[str, Any], per_node: int
) -> tuple[tuple[int, str] | None, dict[str, bytes]]:
    """What the resumed run ends with."""
    enter_node(root, per_node)
    engine = start(run, stage, zero)
    resumed = engine.resume(root / "disk")
    training.train(engine, run, engine.global_steps, LAST)
    result = training.bits(training.weights(engine))
    engine.destroy()
    return None if resumed is None else (resumed.step, resumed.source), result


def undisturbed(root: Path, run: Run, stage: int, zero: dict[str, Any]) -> dict[str, bytes]:
    enter_node(root, 1)
    engine = start(run, stage, zero)
    training.train(engine, run, 0, LAST)
    result = training.bits(training.weights(engine))
    engine.destroy()
    return result


EVERYTHING_OFFLOADED: dict[str, Any] = OFFLOADED | {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, OFFLOADED),
        (3, {}),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((0, {}), (2, {}), (3, EVERYTHING_OFFLOADED))),
    ],
    ids=["1 cpu", "3", "0", "2", "3 cpu"],
)
def test_a_lost_node_goes_on_from_memory_to_the_bit(stage: int, zero: dict[str, Any], tmp_path: Path) -> None:
    run = Run(dtype="bf16")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run_ranks(trains, 2, tmp_path / "a", run, stage, zero, 1, None)
    shutil.rmtree(tmp_path / "a" / "node1")
    ended = run_ranks(goes_on, 2, tmp_path / "a", run, stage, zero, 1)
    expected = run_ranks(undisturbed, 2, tmp_path / "b", run, stage, zero)
    assert [resumed for resumed, _ in ended] == [(4, "memory")] * 2
    assert [result for _, result in ended] == expected


def test_a_lost_rank_goes_on_from_its_own_node(tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    run_ranks(trains, 2, tmp_path, run, 3, {}, 2, None)
    ended = run_ranks(goes_on, 2, tmp_path, run, 3, {}, 2)
    assert [resumed for resumed, _ in ended] == [(4, "memory")] * 2


@pytest.mark.parametrize(("before", "after", "lost"), [(3, 2, 2), pytest.param(2, 3, 0, marks=pytest.mark.soak)])
def test_another_number_of_nodes_goes_on_from_memory(before: int, after: int, lost: int, tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    run_ranks(trains, before, tmp_path, run, 3, {}, 1, None)
    shutil.rmtree(tmp_path / f"node{lost}")
    ended = run_ranks(goes_on, after, tmp_path, run, 3, {}, 1)
    assert [resumed for resumed, _ in ended] == [(4, "memory")] * after
    whole = training.plain(Run(dtype="fp64", steps=LAST))
    import torch

    for name, raw in ended[0][1].items():
        value = torch.frombuffer(bytearray(raw), dtype=torch.float64)
        assert float((value - whole[name].flatten()).abs().max()) < 1e-12


def goes_back_twice(root: Path, run: Run) -> tuple[list[tuple[int, str]], dict[str, bytes]]:
    """Resumes while a copy is being written, and once more."""
    enter_node(root, 1)
    engine = start(run, 3, {})
    training.train(engine, run, 0, EVERY)
    resumed = [engine.resume(root / "disk") for _ in range(2)]
    training.train(engine, run, engine.global_steps, LAST)
    result = training.bits(training.weights(engine))
    engine.destroy()
    return [(found.step, found.source) for found in resumed], result


def test_resuming_twice_in_one_run_waits_for_the_copy_that_is_under_way(tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    (tmp_path / "b").mkdir()
    ended = run_ranks(goes_back_twice, 2, tmp_path, run)
    assert [resumed for resumed, _ in ended] == [[(EVERY, "memory")] * 2] * 2
    assert [result for _, result in ended] == run_ranks(undisturbed, 2, tmp_path / "b", run, 3, {})


def test_two_lost_nodes_go_on_from_disk(tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    run_ranks(trains, 3, tmp_path, run, 3, {}, 1, 3)
    shutil.rmtree(tmp_path / "node0")
    shutil.rmtree(tmp_path / "node1")
    ended = run_ranks(goes_on, 3, tmp_path, run, 3, {}, 1)
    assert [resumed for resumed, _ in ended] == [(3, "disk")] * 3


def test_the_newer_of_memory_and_disk_is_loaded(tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    run_ranks(trains, 2, tmp_path, run, 2, {}, 1, 5)
    assert run_ranks(goes_on, 2, tmp_path, run, 2, {}, 1)[0][0] == (5, "disk")


def test_a_damaged_copy_is_passed_over(tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    run_ranks(trains, 2, tmp_path, run, 2, {}, 1, 3)
    for file in (tmp_path / "node0").glob("memory/step4-*/rank-00000.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(raw)
    assert run_ranks(goes_on, 2, tmp_path, run, 2, {}, 1)[0][0] == (3, "disk")


def two_runs(root: Path, run: Run) -> list[tuple[int, str] | None]:
    """What a run, the same again and another with the same memory begin with; the last one twice."""
    enter_node(root, 1)
    found = []
    for folder in ("one", "one", "other", "other"):
        engine = start(run, 3, {})
        resumed = engine.resume(root / folder)
        found.append(None if resumed is None else (resumed.step, resumed.source))
        training.train(engine, run, engine.global_steps, engine.global_steps + 2)
        engine.destroy()
    return found


def test_a_run_does_not_go_on_from_what_another_left_in_memory(tmp_path: Path) -> None:
    for found in run_ranks(two_runs, 2, tmp_path, Run(dtype="fp64")):
        assert found == [None, (2, "memory"), None, (2, "memory")]


def in_default_folders(root: Path, run: Run) -> tuple[list[tuple[int, str] | None], list[bool], dict[str, bytes]]:
    """Start two runs that name no folder for their copies, the first of them twice. Return the state that each start
    resumes from, which of the folders are there, and the first run's result."""
    found: list[tuple[int, str] | None] = []
    weights: dict[str, bytes] = {}
    for folder, until in (("one", STEPS), ("other", EVERY), ("one", LAST)):
        engine = start(run, 3, {}, None)
        resumed = engine.resume(root / folder)
        found.append(None if resumed is None else (resumed.step, resumed.source))
        training.train(engine, run, engine.global_steps, until)
        weights = training.bits(training.weights(engine))
        engine.destroy()
    return found, [node_memory_folder(str(root / folder)).is_dir() for folder in ("one", "other")], weights


def test_a_run_that_names_no_folder_has_one_in_memory_for_its_checkpoints_folder(tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    try:
        ended = run_ranks(in_default_folders, 2, tmp_path, run)
    finally:
        for folder in ("one", "other"):
            shutil.rmtree(node_memory_folder(str(tmp_path / folder)), ignore_errors=True)
    (tmp_path / "b").mkdir()
    expected = run_ranks(undisturbed, 2, tmp_path / "b", run, 3, {})
    for rank, (found, kept, weights) in enumerate(ended):
        assert found == [None, None, (4, "memory")] and kept == [True, True]
        assert weights == expected[rank]


def no_folder(root: Path) -> str:
    engine = start(Run(dtype="fp64"), 1, {}, None)
    with pytest.raises(UsageError) as caught:
        training.train(engine, Run(dtype="fp64"), 0, 1)
    engine.destroy()
    return str(caught.value)


def test_copies_of_a_run_that_has_named_no_folder_at_all_are_refused_at_the_first_step(tmp_path: Path) -> None:
    expected = "checkpoint.in_memory.every is 2, but no folder is known: set checkpoint.in_memory.path, or call"
    assert all(told.startswith(expected) for told in run_ranks(no_folder, 2, tmp_path))


def test_a_first_start_says_so(tmp_path: Path) -> None:
    run = Run(dtype="fp64")
    assert [resumed for resumed, _ in run_ranks(goes_on, 2, tmp_path, run, 1, {}, 1)] == [None, None]
