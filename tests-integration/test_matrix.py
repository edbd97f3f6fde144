"""The whole matrix against the fp64 oracle: models x stages x world sizes x accumulation x recomputation x frozen.

CI runs a part in which every pair of values of any two axes occurs; `nox -s soak` runs all of it.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
import training
import zoo
from training import Run

from zero_comm import run_ranks

AXES: dict[str, tuple[object, ...]] = {
    "model": ("plain", "unused", "reused", "two losses", "functional use"),
    "stage": (0, 1, 2, 3),
    "world_size": (1, 2, 3),
    "accumulation": (1, 3),
    "recomputed": ("no", "recomputed", "recomputed reentrant"),
    "frozen": (False, True),
}
ORACLE = 1e-12
CI_STEPS = 10


class Case(NamedTuple):
    """One point of the matrix; the fields are `AXES`."""

    model: str
    stage: int
    world_size: int
    accumulation: int
    recomputed: str
    frozen: bool

    def __str__(self) -> str:
        trained = "frozen" if self.frozen else "trained"
        numbers = f"stage{self.stage}-{self.world_size}ranks-{self.accumulation}times"
        return f"{self.model}-{numbers}-{self.recomputed}-{trained}".replace(" ", "_")

    def run(self, steps: int) -> Run:
        """What to train."""
        parts = [self.model, *([self.recomputed] if self.recomputed != "no" else []), *(["frozen"] * self.frozen)]
        return Run(" + ".join(parts), steps=steps, accumulation=self.accumulation, clip=0.1)

    def pairs(self) -> set[tuple[tuple[int, object], tuple[int, object]]]:
        """The values of every two axes."""
        return set(itertools.combinations(enumerate(self), 2))


def every_pair(cases: list[Case]) -> list[Case]:
    """The first cases that have, together, all pairs: each time the one that adds most."""
    chosen, missing = [], set().union(*(case.pairs() for case in cases))
    while missing:
        best = max(cases, key=lambda case: len(case.pairs() & missing))
        chosen.append(best)
        missing -= best.pairs()
    return chosen


ALL = [Case(*values) for values in itertools.product(*AXES.values())]  # type: ignore[arg-type]
SPREAD = every_pair(ALL)


@functools.cache
def one_process(run: Run) -> dict[str, torch.Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks; the models are too small for more
    try:
        return training.plain(run)
    finally:
        torch.set_num_threads(threads)


def check(case: Case, steps: int) -> None:
    run = case.run(steps)
    weights = run_ranks(training.ranks, case.world_size, run, case.stage)[0]
    assert training.deviation(weights, one_process(run)) <= ORACLE


def test_the_part_in_ci_has_every_pair_of_values() -> None:
    assert len(SPREAD) <= 25
    for (one, values), (two, others) in itertools.combinations(enumerate(AXES.values()), 2):
        seen = {(case[one], case[two]) for case in SPREAD}
        assert seen == set(itertools.product(values, others))


@pytest.mark.parametrize("case", SPREAD, ids=str)
def test_pairs_of_the_matrix_follow_the_oracle(case: Case) -> None:
    check(case, CI_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_whole_matrix_follows_the_oracle(case: Case) -> None:
    check(case, 50)


def test_the_models_are_what_the_axes_say() -> None:
    model = zoo.build("two losses + recomputed + frozen")
    assert model.two_losses and model.recompute == "non-reentrant"
    assert not all(p.requires_grad for p in model.parameters())
