"""Checkpoints of the engine: atomic, bitwise, and loadable at any world size and stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run

from zero_comm import run_ranks

HALF, END = 4, 7


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Weights as the optimizer sees them, and its moments, whole."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        place = engine.partition.find(parameter)
        if place is not None and place[0].plan.trainable:
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{key}"] = engine.full_state(parameter, key)
    return {**training.weights(engine), **found}


def save(run: Run, stage: int, path: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Train to HALF, save, go on to END; return the states at both."""
    engine = training.start(run, stage)
    training.train(engine, run, 0, HALF)
    engine.save_checkpoint(path, client_state={"epoch": 3, "names": ["a", "b"]})
    at_half = training.bits(states(engine))
    training.train(engine, run, HALF, END)
    return at_half, training.bits(states(engine))


def load(run: Run, stage: int, path: str) -> tuple[dict[str, bytes], dict[str, bytes], Any]:
    """Load into a differently seeded model; return the states then and after training on to END."""
    model = zoo.build(run.variant, training.DTYPES["fp32" if run.dtype == "bf16" else run.dtype], seed=9)
    engine = training.start(run, stage, model)
    _, client_state = engine.load_checkpoint(path)
    at_half = training.bits(states(engine))
    counters = (engine.global_steps, engine.micro_steps, client_state)
    training.train(engine, run, HALF, END)
    return at_half, training.bits(states(engine)), counters


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (2, 3), (3, 4), (3, 2)])
def test_a_checkpoint_loads_bitwise_at_any_stage_and_world_size(
    tmp_path: Path, dtype: str, stage: int, world_size: int
) -> None:
    run = Run("frozen and unused", accumulation=2, clip=0.1, dtype=dtype)
    path = str(tmp_path / "ckpt")
    saved, _ = run_ranks(save, world_size, run, stage, path)[0]
    for other_stage, other_size in [(0, 2), (1, 3), (2, 1), (3, 3), (3, 1)]:
        loaded, _, counters = run_ranks(load, other_size, run, other_stage, path)[0]
        assert loaded == saved
        assert counters == (HALF, 2 * HALF, {"epoch": 3, "names": ["a", "b"]})


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_training_goes_on_bitwise_as_if_never_interrupted(tmp_path: Path, dtype: str, stage: int) -> None:
    run = Run("reused", clip=0.1, dtype=dtype)
    path = str(tmp_path / "ckpt")
    _, uninterrupted = run_ranks(save, 2, run, stage, path)[0]
    _, resumed, _ = run_ranks(load, 2, run, stage, path)[0]
    assert resumed == uninterrupted


def load_wrong(path: str, variant: str) -> str:
    engine = training.start(Run(variant), 3)
    try:
        engine.load_checkpoint(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_checkpoint_of_another_model_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run_ranks(save, 2, Run(), 3, path)
    for message in run_ranks(load_wrong, 2, path, "frozen and unused"):
        assert message.startswith("MismatchError") and "unused.weight" in message


def test_no_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    for message in run_ranks(load_wrong, 2, str(tmp_path / "nothing"), "plain"):
        assert message.startswith("NotFoundError")


def test_tag_and_latest_follow_the_step(tmp_path: Path) -> None:
    run_ranks(save, 2, Run(), 3, str(tmp_path))
    assert (tmp_path / "latest").read_text().strip() == f"global_step{HALF}"
    assert (tmp_path / f"global_step{HALF}" / "manifest.msgpack").exists()


def generators(path: str, resume: bool) -> list[float]:
    """Random numbers drawn on this rank after a save or a load."""
    engine = training.start(Run(), 3)
    torch.manual_seed(dist.get_rank() + (100 if resume else 0))
    if resume:
        engine.load_checkpoint(path)
    else:
        engine.save_checkpoint(path)
    return torch.rand(3).tolist()


def test_generators_of_every_rank_resume(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    saved = run_ranks(generators, 2, path, False)
    assert saved[0] != saved[1]
    assert run_ranks(generators, 2, path, True) == saved
