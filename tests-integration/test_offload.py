"""Masters, moments, gradients and parameter shards on other tiers: nothing about the numbers changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from offload_runs import build, facts, settings, start, tiers, trained
from training import Run

from zero_comm import run_ranks

CASES = [
    (Run("plain", steps=3, dtype="fp32", clip=0.5, accumulation=2), 1, 2),
    (Run("plain", steps=3, dtype="bf16", clip=0.5), 2, 2),
    (Run("plain", steps=3, dtype="bf16", clip=0.5, accumulation=2), 3, 2),
    (Run("frozen and unused", steps=3, dtype="fp32"), 3, 3),
    (Run("plain", steps=6, dtype="fp16"), 3, 1),
    (Run("plain", steps=3, dtype="fp64", clip=0.5), 3, 1),
]

STEPS = {"fp32": 4, "bf16": 4, "fp64": 4, "fp16": 6}  # with float16 the first ones overflow
MATRIX = [
    (Run(variant, steps=STEPS[dtype], dtype=dtype, clip=clip, accumulation=accumulation), stage, ranks)
    for variant in ("plain", "frozen and unused", "reused")
    for dtype in STEPS
    for clip, accumulation in ((0.0, 1), (0.5, 3))
    for stage in (1, 2, 3)
    for ranks in (1, 2, 3)
]


@pytest.mark.parametrize(
    ("run", "stage", "ranks"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MATRIX if case not in CASES)],
    ids=lambda value: str(value),
)
def test_every_tier_gives_the_same_bits(run: Run, stage: int, ranks: int, tmp_path: Path) -> None:
    expected = run_ranks(trained, ranks, run, stage, {})
    assert (expected[0]["skipped"] > 0) == (run.dtype == "fp16")
    for name, zero in tiers(tmp_path, stage).items():
        results = run_ranks(trained, ranks, run, stage, zero)
        for ours, theirs in zip(results, expected, strict=True):
            for fact in ("losses", "norm", "skipped"):
                assert ours[fact] == theirs[fact], (name, fact)
            different = [key for key, value in theirs["facts"].items() if ours["facts"][key] != value]
            assert not different, (name, different)
        assert {path.suffix for path in tmp_path.rglob("*")} <= {".lock"}, name  # swept


RESUMED = Run("plain", steps=4, dtype="bf16", clip=0.5)
HALF = 2


def save_half(folder: str, stage: int, zero: dict[str, Any]) -> dict[str, bytes]:
    engine = start(RESUMED, stage, zero)
    training.train(engine, RESUMED, 0, HALF)
    engine.save_checkpoint(folder)
    training.train(engine, RESUMED, HALF, RESUMED.steps)
    result = facts(engine)
    engine.destroy()
    return result


def load_half(folder: str, stage: int, zero: dict[str, Any], last: int) -> dict[str, bytes]:
    engine = start(RESUMED, stage, zero)
    training.train(engine, RESUMED, 0, 1)  # leave something behind that must not survive
    engine.load_checkpoint(folder)
    training.train(engine, RESUMED, HALF, last)
    result = facts(engine)
    engine.destroy()
    return result


def test_checkpoints_of_any_tier_load_at_any_other(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    everywhere = {"device": {}, **tiers(drive, 3)}
    saved = {name: tmp_path / f"saved {name}".replace(" ", "-") for name in everywhere}
    expected = run_ranks(save_half, 2, str(saved["device"]), 3, {})[0]
    for name in ("host", "all nvme"):
        assert run_ranks(save_half, 2, str(saved[name]), 3, everywhere[name])[0] == expected, name
    for source, target in (("device", "all nvme"), ("all nvme", "device"), ("all nvme", "all nvme"), ("host", "nvme")):
        loaded = run_ranks(load_half, 2, str(saved[source]), 3, everywhere[target], RESUMED.steps)
        assert loaded[0] == expected, (source, target)
    at_half = run_ranks(load_half, 2, str(saved["device"]), 3, {}, HALF)[0]
    for ranks in (1, 3):
        assert run_ranks(load_half, ranks, str(saved["all nvme"]), 2, everywhere["host"], HALF)[0] == at_half


def whole_values(zero: dict[str, Any]) -> dict[str, Any]:
    engine = start(Run("plain", dtype="bf16"), 3, zero)
    training.train(engine, Run("plain", dtype="bf16"), 0, 1)
    name, p = next((n, p) for n, p in engine.module.named_parameters() if p.ndim == 2)
    engine.set_full_param(p, torch.full(p.shape, 0.123456789))
    engine.set_full_state(p, "exp_avg", torch.full(p.shape, 0.25))
    engine.backward(sum(engine(*zoo.batch(1, 0, dist.get_rank(), dist.get_world_size()))))
    gradient = engine.full_grad(p)
    assert gradient is not None
    engine.set_full_grad(p, gradient * 2)
    result = {
        "param": engine.full_param(p),
        "state": engine.full_state(p, "exp_avg"),
        "gradient": engine.full_grad(p),
    }
    engine.step()
    result["after"] = engine.full_param(p)
    engine.destroy()
    return {key: training.bits({key: value})[key] for key, value in result.items()} | {"name": name.encode()}


def test_whole_values_are_read_and_written_on_every_tier(tmp_path: Path) -> None:
    expected = run_ranks(whole_values, 2, {})
    for name, zero in tiers(tmp_path, 3).items():
        assert run_ranks(whole_values, 2, zero) == expected, name


def built(zero: dict[str, Any], inside: bool) -> dict[str, bytes]:
    """Weights after two steps of a model that is drawn in float32 in or outside of `Init`."""
    import zero_core

    run = Run("plain", steps=2, dtype="bf16")
    config = settings(run, 3, zero)
    torch.manual_seed(5)
    with zero_core.Init(config, enabled=inside):
        model = zoo.Transformer()
        torch.nn.init.normal_(model.embedding.weight, std=0.02)
    engine = zero_core.initialize(model=model, config=config)[0]
    training.train(engine, run, 0, run.steps)
    result = facts(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_built_into_files_is_the_one_that_one_process_draws(ranks: int, tmp_path: Path) -> None:
    expected = run_ranks(built, ranks, {}, False)[0]
    assert run_ranks(built, ranks, tiers(tmp_path, 3)["all nvme"], True)[0] == expected
    assert {path.suffix for path in tmp_path.rglob("*")} <= {".lock"}


def refused(config: dict[str, Any], kind: str | None) -> str:
    import zero_core

    model = build(Run(dtype="fp32"))
    optimizer = getattr(torch.optim, kind)(model.parameters()) if kind else None
    try:
        zero_core.initialize(model=model, optimizer=optimizer, config=config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("zero", "kind", "words"),
    [
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, None, ["stage 1, 2 or 3"]),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "Adafactor", ["Adafactor", "or use Adam"]),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, None, ["offload_param.nvme_path"]),
        (
            {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/proc/none"}},
            None,
            ["UsageError", "offload_optimizer.nvme_path", "no folder '/proc/none'", "'/proc'"],
        ),
        (
            {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/proc"}},
            None,
            ["BudgetError", "/proc"],
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused_by_name(zero: dict[str, Any], kind: str | None, words: list[str]) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        **({} if kind else {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}),
    }
    for message in run_ranks(refused, 2, config, kind):
        assert all(word in message for word in words), message
