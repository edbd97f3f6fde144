"""Models of Transformers over sequence shards, against one process that sees the full sequences."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from sequence_models import CASES, one_process, over_shards

from zero_comm import run_ranks

STEPS = 3
SOAK = pytest.mark.soak


@functools.cache
def sharded(size: int, data: int) -> list[dict[str, Any]]:
    return run_ranks(over_shards, size * data, list(CASES), size, STEPS, timeout=280.0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("size", "data"), [(1, 1), (2, 1), (4, 1), (2, 2), pytest.param(1, 2, marks=SOAK), pytest.param(4, 2, marks=SOAK)]
)
def test_weights_and_losses_are_those_of_one_process(size: int, data: int, name: str) -> None:
    expected, losses = one_process(CASES[name], data, STEPS)
    answers = [answer[name] for answer in sharded(size, data)]
    for got, _, _ in answers:
        assert got.keys() == expected.keys()
        assert max(float((got[key] - expected[key]).abs().max()) for key in expected) <= 1e-12
    means = [sum(answers[group * size][1][step] for group in range(data)) / data for step in range(STEPS)]
    torch.testing.assert_close(torch.tensor(means), torch.tensor(losses), rtol=0, atol=1e-12)
