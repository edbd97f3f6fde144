"""What `Engine.train_batch` takes as micro-batches: lists, iterators and loaders; too few are refused on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from train_batch_runs import MICRO_BATCHES, Case, Net, batches, config, facts

import zero_core
from zero_comm import run_ranks

STEPS = 3
CASES = [Case("net", tier="nvme"), Case("net", stage=1)]


def stream(failing: int | None = None) -> Iterator[torch.Tensor]:
    """The micro-batches of all steps, one after the other; ``failing``: raises in its place."""
    for number, ids in enumerate(ids for step in range(STEPS) for ids in batches(step)):
        if number == failing:
            raise OSError("the file is gone")
        yield ids


class Samples(Dataset[torch.Tensor]):
    """The samples of all micro-batches of this rank."""

    def __init__(self) -> None:
        self.samples = torch.cat(list(stream()))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.samples[number]


def fed(case: Case, folder: str, how: str) -> tuple[dict[str, bytes], int]:
    """The facts after all steps, fed in the way ``how``, and how many micro-batches are left in the iterator."""
    engine = zero_core.initialize(model=Net(), config=config(case, folder))[0]
    source: Iterator[Any] = iter(DataLoader(Samples(), batch_size=2)) if how == "loader" else stream()
    for step in range(STEPS - 1):
        engine.train_batch(batches(step) if how == "list" else source)
    left = sum(1 for _ in source)
    found = facts(engine), left
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("case", CASES)
def test_an_iterator_gives_the_next_micro_batches_of_each_step(case: Case, tmp_path: Path) -> None:
    expected = run_ranks(fed, 2, case, str(tmp_path), "list")
    for how in ("generator", "loader"):
        for (found, left), (listed, _) in zip(run_ranks(fed, 2, case, str(tmp_path), how), expected, strict=True):
            assert found == listed
            assert left == MICRO_BATCHES


def given(how: str) -> Any:
    """Micro-batches that rank 1 cannot take a step with, while rank 0 can."""
    if dist.get_rank() == 0:
        return iter(batches(0))
    source = stream(failing=1)
    ways = {
        "short": lambda: iter(batches(0)[:2]),
        "short list": lambda: batches(0)[:2],
        "loader": lambda: DataLoader(Samples(), batch_size=2),
        "unsized": lambda: DataLoader(Endless(), batch_size=None),
        "failing": lambda: source,
        "one buffer": refilled,
        "one dict": lambda: {"ids": batches(0)[0]},
        "one tensor": lambda: torch.stack(batches(0)),
        "none": lambda: None,
    }
    return ways[how]()


def refilled() -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches that are one tensor, written anew for each."""
    buffer = torch.empty(2, 5, dtype=torch.int64)
    for ids in batches(0):
        yield {"ids": buffer.copy_(ids)}


class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield batches(0)[0]


SAID = {
    "short": "got 2 before the iterator ended",
    "short list": "got 2",
    "loader": "iter(loader)",
    "unsized": "iter(loader)",
    "failing": "OSError: the file is gone",
    "one buffer": "micro-batch 0 was written over by the iterator",
    "one dict": "got one dict",
    "one tensor": "got one Tensor",
    "none": "got one NoneType",
}


def refused(case: Case, folder: str) -> tuple[dict[str, str], bool]:
    """By way, what this rank says; and whether nothing is changed by all of them: the next steps have the bits of an
    engine without them."""
    found = []
    said = {}
    for ways in ([], list(SAID)):
        engine = zero_core.initialize(model=Net(), config=config(case, folder))[0]
        engine.train_batch(batches(0))
        for how in ways:
            with pytest.raises(zero_core.UsageError) as caught:
                engine.train_batch(given(how))
            said[how] = str(caught.value)
        engine.train_batch(batches(1))
        found.append((facts(engine), engine.global_steps, engine.micro_steps))
        engine.destroy(unshard=False)
    return said, found[0] == found[1]


@pytest.mark.parametrize("case", CASES)
def test_too_few_micro_batches_on_one_rank_are_refused_on_all_before_anything_changes(
    case: Case, tmp_path: Path
) -> None:
    for said, unchanged in run_ranks(refused, 2, case, str(tmp_path)):
        for how, words in SAID.items():
            assert f"rank 1 expected gradient_accumulation_steps = {MICRO_BATCHES}" in said[how]
            assert words in said[how]
        assert unchanged


def begun(folder: str) -> list[str]:
    """What is said in the middle of an accumulation, and where the user counts; the iterators keep all they have."""
    engine = zero_core.initialize(model=Net(), config=config(CASES[0], folder))[0]
    engine.backward(engine(batches(0)[0]))
    engine.step()
    said, source = [], stream()
    for _ in range(2):
        with pytest.raises(zero_core.UsageError) as caught:
            engine.train_batch(source)
        said.append(str(caught.value))
        engine.set_gradient_accumulation_boundary(True)
    assert sum(1 for _ in source) == STEPS * MICRO_BATCHES
    engine.destroy(unshard=False)
    return said


def test_an_accumulation_that_has_begun_is_refused_with_its_micro_batches_left(tmp_path: Path) -> None:
    middle, counted = run_ranks(begun, 1, str(tmp_path))[0]
    assert "1 micro-batches are counted: end it by engine.step" in middle
    assert "its boundary was set by hand" in counted
