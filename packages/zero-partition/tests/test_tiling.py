"""A layer in tiles computes what the whole layer does, and only one tile is present at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_comm import Mesh, run_ranks
from zero_partition import PartitionError, PartitionOptions, TiledLinear, UnitLimits, partition
from zero_precision import PrecisionPolicy


@pytest.mark.parametrize("in_splits", (1, 3))
@pytest.mark.parametrize("out_splits", (1, 4))
@pytest.mark.parametrize("bias", (True, False))
def test_tiles_give_the_values_and_gradients_of_the_whole_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(10, 14, bias).double()
    tiled = TiledLinear.from_linear(linear, in_splits=in_splits, out_splits=out_splits)
    x = torch.randn(2, 5, 10, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), linear(x))
    linear(x).square().sum().backward()
    tiled(x).square().sum().backward()
    rows = [
        torch.cat([tiled.tile(row, column).weight.grad for column in range(in_splits)], dim=1)
        for row in range(out_splits)
    ]
    torch.testing.assert_close(torch.cat(rows), linear.weight.grad)


@pytest.mark.parametrize("splits", (0, 11))
def test_more_splits_than_features_are_refused(splits: int) -> None:
    with pytest.raises(PartitionError, match=f"10 features, got {splits}"):
        TiledLinear(10, 14, in_splits=splits)


def peak_of_gathered_elements() -> tuple[int, int]:
    groups = Mesh(device=torch.device("cpu")).open_groups()
    model = TiledLinear(64, 64, in_splits=2, out_splits=4)
    options = PartitionOptions(3, PrecisionPolicy.full(), UnitLimits(min_numel=1), prefetch_numel=0)
    parts = partition(model, groups, options)
    peak = 0

    def watch(*_: object) -> None:
        nonlocal peak
        peak = max(peak, sum(u.flat.untyped_storage().nbytes() // 4 for u in parts.units if u.releasable))

    for tile in model.tiles:
        tile.register_forward_hook(watch)
    with torch.no_grad():
        model(torch.randn(3, 64))
        peak = 0
        model(torch.randn(3, 64))
    return peak, max(u.layout.numel for u in parts.units)


def test_one_tile_is_present_at_a_time() -> None:
    for peak, largest in run_ranks(peak_of_gathered_elements, 2):
        assert peak <= largest
