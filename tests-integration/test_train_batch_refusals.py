"""What `Engine.train_batch` refuses by name, and failures inside it: the engine goes on, or every rank knows why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from train_batch_refusals import REFUSED, Cut, rank_1_short
from train_batch_runs import Case, Net, arguments, batches, config, facts

import zero_core
from zero_comm import run_ranks


def refused(
    folder: str, build: Callable[[], nn.Module], given: Callable[[nn.Module, int], list[Any]]
) -> tuple[str, bool]:
    """What a step says, and whether the next, ordinary one trains."""
    model = build()
    engine = zero_core.initialize(model=model, config=config(Case("net", tier="nvme"), folder))[0]
    with pytest.raises(Exception) as caught:
        engine.train_batch(given(model, dist.get_rank()))
    engine.zero_grad()
    before = engine.full_param(next(model.parameters())).clone()
    for ids in batches(0):
        one = {**arguments(model, ids), "use_cache": False} if hasattr(model, "config") else ids
        output = engine(**one) if isinstance(one, dict) else engine(one)
        engine.backward(output["loss"] if isinstance(one, dict) else output)
        engine.step()
    moved = not torch.equal(before, engine.full_param(next(model.parameters())))
    engine.destroy(unshard=False)
    return f"{type(caught.value).__name__}: {caught.value}", moved


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_go_unit_by_unit_is_refused_by_name_and_the_engine_goes_on(ranks: int, tmp_path: Path) -> None:
    for build, given, expected in REFUSED:
        for said, moved in run_ranks(refused, ranks, str(tmp_path), build, given):
            assert all(word in said for word in expected), said
            assert moved


def goes_on(folder: str) -> dict[str, bytes]:
    """Three steps, before the second of which a loss fails for the second micro-batch."""
    engine = zero_core.initialize(model=Net(), config=config(Case("net", tier="nvme"), folder))[0]
    calls = iter(range(100))

    def failing(output: torch.Tensor, _batch: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise ValueError("no loss")
        return output

    engine.train_batch(batches(0))
    with pytest.raises(ValueError, match="no loss"):
        engine.train_batch(batches(1), failing)
    assert not any(unit.pins for unit in engine.partition.units)
    with pytest.raises(Exception, match="zero_grad"):
        engine.train_batch(batches(1))
    engine.zero_grad()
    for step in (1, 2):
        engine.train_batch(batches(step))
    found = facts(engine)
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(zero_core.UsageError, match="its boundary was set by hand"):
        engine.train_batch(batches(1))
    engine.destroy(unshard=False)
    return found


def went_on(folder: str) -> dict[str, bytes]:
    engine = zero_core.initialize(model=Net(), config=config(Case("net", tier="nvme"), folder))[0]
    for step in range(3):
        engine.train_batch(batches(step))
    found = facts(engine)
    engine.destroy(unshard=False)
    return found


def test_a_caught_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run_ranks(goes_on, 1, str(tmp_path)) == run_ranks(went_on, 1, str(tmp_path))


def fails_alone(folder: str) -> str:
    """What a rank says when only rank 1's second micro-batch fails."""
    engine = zero_core.initialize(model=Net(), config=config(Case("net"), folder))[0]
    given = batches(0)
    given[1] = given[1] + (30 if dist.get_rank() == 1 else 0)
    with pytest.raises(Exception) as caught:
        engine.train_batch(given)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_failure_of_one_rank_ends_the_step_on_all(tmp_path: Path) -> None:
    told, raised = run_ranks(fails_alone, 2, str(tmp_path))
    assert "IndexError" in raised
    assert "rank 1" in told and "IndexError" in told


def test_ranks_whose_micro_batches_visit_other_modules_are_told(tmp_path: Path) -> None:
    for said, moved in run_ranks(refused, 2, str(tmp_path), Cut, rank_1_short):
        assert "PartitionError" in said and "visit different modules" in said
        assert moved
