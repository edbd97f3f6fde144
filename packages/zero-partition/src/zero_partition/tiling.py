"""Linear layers in tiles that are gathered and released one by one: memory-centric tiling."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from .errors import PartitionError


class TiledLinear(nn.Module):
    """A linear layer split into ``in_splits`` x ``out_splits`` tiles, each a linear layer of its own.

    Under stage 3 a tile is a unit (or part of one): only one tile of weights is present at a time, so a layer larger
    than the allowed memory computes (ZeRO-Infinity, arXiv 2104.07857, section 5.1.3). Input (..., in_features), output
    (..., out_features). Sums over input tiles are taken in order, so values differ from one large product by rounding
    only. ``bias``, ``device`` and ``dtype`` are as in `nn.Linear`. Raises `PartitionError` when there are more splits
    than features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_sizes = _slice_sizes("in", in_features, in_splits)
        self.out_sizes = _slice_sizes("out", out_features, out_splits)
        self.in_features, self.out_features = in_features, out_features
        self.tiles = nn.ModuleList()
        for rows in self.out_sizes:
            for number, columns in enumerate(self.in_sizes):
                self.tiles.append(nn.Linear(columns, rows, bias and number == 0, device=device, dtype=dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """Return a tiled layer with copies of the weights of ``linear``, which computes the same up to rounding. The
        copies require gradients even where the weights of ``linear`` do not.

        Raises `PartitionError` when there are more splits than features.
        """
        weight = linear.weight
        tiled = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            in_splits=in_splits,
            out_splits=out_splits,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            for row, rows in enumerate(torch.split(weight, tiled.out_sizes)):
                for column, part in enumerate(torch.split(rows, tiled.in_sizes, dim=1)):
                    tiled.tile(row, column).weight.copy_(part)
            if linear.bias is not None:
                for row, bias in enumerate(torch.split(linear.bias, tiled.out_sizes)):
                    tiled.tile(row, 0).bias.copy_(bias)
        return tiled

    def tile(self, row: int, column: int) -> nn.Linear:
        """Return the tile that maps slice ``column`` of the input features to slice ``row`` of the output features."""
        return cast(nn.Linear, self.tiles[row * len(self.in_sizes) + column])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output (..., out_features) for ``x`` (..., in_features), computed tile by tile, one row of
        tiles after the other."""
        inputs = torch.split(x, self.in_sizes, dim=-1)
        outputs = []
        for row in range(len(self.out_sizes)):
            total = self.tile(row, 0)(inputs[0])
            for column in range(1, len(inputs)):
                total = total + self.tile(row, column)(inputs[column])
            outputs.append(total)
        return torch.cat(outputs, dim=-1)


def _slice_sizes(which: str, features: int, splits: int) -> list[int]:
    """Return the sizes of ``splits`` nearly equal slices of ``features``, the larger ones first.

    ``which``: "in" or "out", for the error. Raises `PartitionError` unless 1 <= ``splits`` <= ``features``.
    """
    if not 1 <= splits <= features:
        raise PartitionError(
            f"TiledLinear: expected 1 to {features} {which}_splits for {features} features, got {splits}"
        )
    base, extra = divmod(features, splits)
    return [base + (number < extra) for number in range(splits)]
