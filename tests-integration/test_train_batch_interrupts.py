"""Ctrl-C and failures anywhere in `Engine.train_batch`: the engine goes on exactly, or each rank says what to do."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from train_batch_runs import MICRO_BATCHES, Case, Net, batches, config, facts

import zero_core
import zero_partition
from zero_comm import run_ranks

SOURCES = str(Path(zero_core.__file__).parent), str(Path(zero_partition.__file__).parent)
STRIKES = 12


class Interrupted(NamedTuple):
    """What an interrupted step left: its error, the error of the call after it, the facts after two more steps, whether
    the random generators and weights are those from before, and the lines that the engine ran in the step."""

    error: str
    refusal: str
    facts: dict[str, bytes]
    is_as_before: bool
    lines: int


class Strike:
    """Raises KeyboardInterrupt in this thread before line ``at`` that the engine's code runs; counts the lines."""

    def __init__(self, at: int) -> None:
        self.lines, self._at = 0, at

    def __call__(self, frame: Any, _event: str, _arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        self.lines += 1
        if self.lines == self._at:
            raise KeyboardInterrupt
        return self


def struck(case: Case, folder: str, at: int) -> Interrupted:
    """Interrupt the second step on the last rank, then follow the advice and train on."""
    engine = zero_core.initialize(model=Net(drop=0.2), config=config(case, folder))[0]
    torch.manual_seed(5)
    engine.train_batch(batches(0))
    random, strike = torch.get_rng_state(), Strike(at)
    error = refusal = ""
    if dist.get_rank() == dist.get_world_size() - 1:
        sys.settrace(strike)
    try:
        engine.train_batch(batches(1))
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    finally:
        sys.settrace(None)
    taken = engine.global_steps == 2
    as_before = torch.equal(torch.get_rng_state(), random)
    found: dict[str, bytes] = {}
    try:
        if error and not taken:
            engine.zero_grad()
            torch.set_rng_state(random)
            engine.train_batch(batches(1))
        engine.train_batch(batches(2))
        found = facts(engine)
    except Exception as failure:
        refusal = f"{type(failure).__name__}: {failure}"
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("micro-batch")] == []
    assert refusal or not any(unit.pins for unit in engine.partition.units)
    engine.destroy(unshard=False)
    return Interrupted(error, refusal, found, as_before or taken, strike.lines)


@pytest.mark.parametrize("strikes", [STRIKES, pytest.param(300, marks=pytest.mark.soak)])
def test_after_an_interrupt_anywhere_the_next_step_has_the_same_bits_or_says_what_to_do(
    strikes: int, tmp_path: Path
) -> None:
    case = Case("net", tier="nvme")
    whole = run_ranks(struck, 1, case, str(tmp_path), -1)[0]
    exact = 0
    for number in range(strikes):
        found = run_ranks(struck, 1, case, str(tmp_path), whole.lines * (2 * number + 1) // (2 * strikes))[0]
        assert found.error.startswith("KeyboardInterrupt"), found.error
        if found.refusal:  # in the update of weights on a tier, which has left two steps
            assert "load the last checkpoint" in found.refusal
            continue
        exact += 1
        assert found.facts == whole.facts
    assert exact >= strikes // 3


@pytest.mark.parametrize("strikes", [4, pytest.param(60, marks=pytest.mark.soak)])
def test_an_interrupt_on_one_rank_ends_the_step_on_all_with_its_cause(strikes: int, tmp_path: Path) -> None:
    case = Case("net")
    whole = run_ranks(struck, 2, case, str(tmp_path), -1)
    for number in range(strikes):
        at = whole[1].lines * (2 * number + 1) // (2 * strikes)
        for rank, found in enumerate(run_ranks(struck, 2, case, str(tmp_path), at)):
            assert "KeyboardInterrupt" in found.error, (at, rank, found.error)
            if found.refusal:
                assert "KeyboardInterrupt" in found.refusal or "load" in found.refusal, (at, rank, found.refusal)
            else:
                assert found.facts == whole[rank].facts


def fails_in_its_loss(case: Case, folder: str, failing: int) -> tuple[str, str, dict[str, bytes]]:
    """What a rank says to a loss that fails for the second micro-batch from rank ``failing`` on, what it says next, and
    the facts after the step that follows the advice; without such ranks only that step."""
    engine = zero_core.initialize(model=Net(), config=config(case, folder))[0]
    calls = iter(range(100))

    def loss_of(output: torch.Tensor, _batch: Any) -> torch.Tensor:
        if next(calls) == 1 and dist.get_rank() >= failing:
            raise ValueError("no loss")
        return output

    said, refusal, found = "", "", {}
    try:
        if failing < dist.get_world_size():
            engine.train_batch(batches(0), loss_of)
    except Exception as failure:
        said = f"{type(failure).__name__}: {failure}"
    try:
        engine.zero_grad()
        engine.train_batch(batches(0))
        found = facts(engine)
    except Exception as failure:
        refusal = f"{type(failure).__name__}: {failure}"
    engine.destroy(unshard=False)
    return said, refusal, found


@pytest.mark.parametrize("case", [Case("net", stage=1), Case("net", stage=2), Case("net")], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_fails_in_the_middle_drops_the_step_on_every_rank(ranks: int, case: Case, tmp_path: Path) -> None:
    whole = run_ranks(fails_in_its_loss, ranks, case, str(tmp_path), ranks)
    assert all(said == "" for said, _, _ in whole)
    for failing in range(ranks):
        for rank, found in enumerate(run_ranks(fails_in_its_loss, ranks, case, str(tmp_path), failing)):
            said, refusal, values = found
            assert "ValueError: no loss" in said
            assert refusal == ""
            assert values == whole[rank][2]


def batches_counted(folder: str) -> tuple[str, list[int]]:
    """The error of a step in which a block fails when backward runs it again, and the batches that each normalization
    has counted."""
    engine = zero_core.initialize(model=Net(normed=True), config=config(Case("net", tier="nvme"), folder))[0]
    calls = iter(range(100))

    def fail_when_run_again(*_: Any) -> None:
        if next(calls) == MICRO_BATCHES:
            raise ValueError("not again")

    engine.module.get_submodule("blocks.1.wide").register_forward_hook(fail_when_run_again)
    said = ""
    try:
        engine.train_batch(batches(0))
    except ValueError as failure:
        said = str(failure)
    counted = [int(block.norm.num_batches_tracked) for block in engine.module.blocks]
    engine.destroy(unshard=False)
    return said, counted


def test_statistics_count_each_micro_batch_once_where_a_block_fails_in_backward(tmp_path: Path) -> None:
    said, counted = run_ranks(batches_counted, 1, str(tmp_path))[0]
    assert "not again" in said
    assert counted == [MICRO_BATCHES] * 3
