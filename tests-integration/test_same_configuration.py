"""Ranks with different configurations are told which keys differ, instead of training on apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run

from zero_comm import run_ranks

SOAK = pytest.mark.soak
DIFFERENCES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a rate": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}},
        ["optimizer.params.lr", "0.25 on rank 1", f"{training.LR} on rank"],
    ),
    "a stage": ({"zero_optimization": {"stage": 2}}, ["zero_optimization.stage", "2 on rank 1"]),
    "a batch size": ({"train_micro_batch_size_per_gpu": 7}, ["train_micro_batch_size_per_gpu", "7 on rank 1"]),
    "several": (
        {"gradient_clipping": 0.5, "deterministic": True},
        ["2 problems", "gradient_clipping", "0.5 on rank 1", "deterministic", "True on rank 1"],
    ),
    "ranks of a node": ({"comm": {"ranks_per_node": 1}}, ["comm.ranks_per_node", "1 on rank 1"]),
    "own reports": ({"steps_per_print": 3, "wall_clock_breakdown": True}, []),
}


def with_differences(stage: int, names: list[str]) -> list[str]:
    import zero_core

    outcomes = []
    for name in names:
        config = training.config(Run(), stage, dist.get_world_size())
        optimizer: Any = None
        if dist.get_rank() == 1 and name in DIFFERENCES:
            changes = DIFFERENCES[name][0]
            merged = {k: {**config[k], **v} if isinstance(config.get(k), dict) else v for k, v in changes.items()}
            config.update(merged)
        model = zoo.build("plain")
        if name == "an optimizer":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if dist.get_rank() == 1 else 0.1)
        try:
            zero_core.initialize(model=model, optimizer=optimizer, config=config)[0].destroy()
            outcomes.append("no error")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 3)])
def test_keys_that_differ_are_named_with_their_ranks(world_size: int, stage: int) -> None:
    words = {name: expected for name, (_, expected) in DIFFERENCES.items()}
    words["an optimizer"] = ["optimizer.param_groups[0].lr", "0.1 on rank", "0.5 on rank 1"]
    for outcomes in run_ranks(with_differences, world_size, stage, list(words), timeout=90):
        for (name, expected), message in zip(words.items(), outcomes, strict=True):
            if expected:
                assert message.startswith("ConfigError") and all(w in message for w in expected), (name, message)
            else:
                assert message == "no error", (name, message)


def with_a_failure_on_rank_1(failures: list[str]) -> list[str]:
    """What each rank raises; the failed rank lives on."""
    import zero_core

    outcomes = []
    for failure in failures:
        config = training.config(Run(), 1, dist.get_world_size())
        model: Any = zoo.build("plain")
        if dist.get_rank() == 1:
            if failure == "an unknown key":
                config["zero_optimisation"] = {}
            elif failure == "no model":
                model = "a model"
        try:
            zero_core.initialize(model=model, config=config)[0].destroy()
            outcomes.append("no error")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_error_of_one_rank_in_initialize_is_every_ranks(world_size: int) -> None:
    words = {"an unknown key": "zero_optimisation", "no model": "torch.nn.Module", "": "no error"}
    results = run_ranks(with_a_failure_on_rank_1, world_size, list(words), timeout=60)
    for rank, outcomes in enumerate(results):
        for word, message in zip(words.values(), outcomes, strict=True):
            assert word in message, (rank, message)
            if word != "no error" and rank != 1:
                assert message.startswith("PeerError: zero_core.initialize: rank 1 failed: "), message


def with_a_rate_of_its_own(stage: int, zero: dict[str, Any]) -> list[str]:
    """A rate, then a flag, that rank 1 alone changes between steps; set back, training continues."""
    engine = training.start(Run(), stage, **zero)
    group = engine.optimizer.param_groups[0]
    training.train(engine, Run(), 0, 1)
    said = []
    for key, value in (("lr", 0.5), ("weight_decay", 0.25)):
        before = group[key]
        if dist.get_rank() == 1:
            group[key] = value
        try:
            training.train(engine, Run(), 1, 2)
            said.append("no error")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        group[key] = before
        engine.zero_grad()
    training.train(engine, Run(), 1, 3)
    said.append(str(training.deviation(training.weights(engine), training.plain(Run(steps=3))) <= 1e-12))
    engine.destroy(unshard=False)
    return said


@pytest.mark.parametrize(
    ("world_size", "stage", "zero"),
    [(2, 0, {}), (3, 3, {}), (2, 1, {"offload_optimizer": {"device": "cpu"}}), pytest.param(3, 2, {}, marks=SOAK)],
)
def test_hyperparameters_that_differ_are_named_before_a_weight_changes(
    world_size: int, stage: int, zero: dict[str, Any]
) -> None:
    for rate, decay, goes_on in run_ranks(with_a_rate_of_its_own, world_size, stage, zero, timeout=90):
        assert rate.startswith("PartitionError: param_groups[0]['lr']") and "0.5 on rank 1" in rate, rate
        assert "param_groups[0]['weight_decay']" in decay and "0.25 on rank 1" in decay, decay
        assert goes_on == "True"
