"""The tree over virtual ranks and the norm over a grid: how they are shared out changes no bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_comm import TreeSum, sum_slices
from zero_partition import GRID, LeafTree
from zero_partition.norm import ExactSum, GridNorm

LEAVES = 16


@pytest.mark.parametrize("adds", (False, True), ids=("added by the tree", "added where it arrives"))
@pytest.mark.parametrize("ranks", (1, 2, 4, 8, 16))
def test_the_mean_over_the_leaves_does_not_depend_on_the_number_of_ranks(ranks: int, adds: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1000, generator=generator).mul(3.0**number) for number in range(LEAVES)]
    expected = torch.empty(1000)
    TreeSum()(leaves, expected, divisor=LEAVES, accumulate=False)
    tree, mean = LeafTree(LEAVES // ranks, LEAVES), None
    for micro in range(LEAVES // ranks):
        assert mean is None and len(tree.tensors()) <= math.log2(LEAVES // ranks) + 1
        neighbour = tree.neighbour() if adds else None
        node = torch.empty(1000) if neighbour is None else neighbour
        own = leaves[micro * ranks : (micro + 1) * ranks]
        (TreeSum() if ranks > 1 else sum_slices)(own, node, divisor=1, accumulate=neighbour is not None)
        mean = tree.add(node)
    assert mean is not None and torch.equal(mean, expected) and not tree.tensors()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(min_value=0, allow_nan=False, allow_infinity=False), max_size=30), st.integers(0, 30))
def test_an_exact_sum_is_rounded_once_and_travels_without_loss(values: list[float], cut: int) -> None:
    first, second = (torch.tensor(part, dtype=torch.float64) for part in (values[:cut], values[cut:]))
    both = ExactSum.of(first) + ExactSum.of_parts(ExactSum.of(second).parts())
    try:
        expected = math.fsum(values)
    except OverflowError:
        expected = math.inf
    assert float(both) == expected


def test_what_is_not_finite_stays_so() -> None:
    assert float(ExactSum.of(torch.tensor([1.0, math.inf], dtype=torch.float64)) + ExactSum()) == math.inf
    assert math.isnan(float(ExactSum() + ExactSum.of_parts(ExactSum.of(torch.tensor([math.nan]).double()).parts())))
    assert not math.isfinite(GridNorm()(torch.full((GRID,), math.nan)))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_the_norm_over_the_grid_does_not_depend_on_shard_boundaries(dtype: torch.dtype) -> None:
    x = torch.randn(700 * GRID, generator=torch.Generator().manual_seed(2), dtype=torch.float64).exp().to(dtype)
    whole = float(GridNorm()(x))
    assert whole == pytest.approx(float(x.double().square().sum()), rel=1e-13)
    for boundary in (1, 255, 256, 257, 699):
        assert float(GridNorm()(x[: boundary * GRID]) + GridNorm()(x[boundary * GRID :])) == whole
