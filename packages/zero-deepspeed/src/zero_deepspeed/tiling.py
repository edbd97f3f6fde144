"""`deepspeed.zero.TiledLinear`: a linear layer in tiles, with DeepSpeed's arguments and names of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from zero_partition import PartitionError, gathered_anywhere


class TiledLinear(nn.Module):
    """A linear layer in ``out_splits`` x ``in_splits`` tiles, which stage 3 gathers one by one. Named as DeepSpeed's.

    ``linears[row][column]`` is the tile from the input features ``in_parts[column]`` to ``in_parts[column + 1]`` to the
    output features ``out_parts[row]`` to ``out_parts[row + 1]``; a bias is in the last column. ``linear_cls``, called
    as `nn.Linear` with ``options``, makes a tile. ``init_linear``: the layer whose weights are copied. With
    ``input_is_already_split`` the input is a sequence of tensors, one per column; without ``combine_out_splits`` the
    output is a list of them, one per row. Raises `PartitionError` for splits that are not 1 to the number of
    features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _slice_bounds("in_splits", in_features, in_splits)
        self.out_parts = _slice_bounds("out_splits", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(stop - start, end - begin, bias=bias and stop == in_features, **options)
                for start, stop in pairwise(self.in_parts)
            )
            for begin, end in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def copy_params_from(self, other: nn.Module) -> None:
        """Copy weight and bias of ``other``, a linear layer with the same numbers of features, into the tiles.
        Collective where the parameters of either are sharded."""
        source = cast(nn.Linear, other)
        given = [parameter for parameter in (source.weight, source.bias) if parameter is not None]
        with torch.no_grad(), gathered_anywhere([*given, *self.parameters()], 0):
            for row, (begin, end) in enumerate(pairwise(self.out_parts)):
                for column, (start, stop) in enumerate(pairwise(self.in_parts)):
                    tile = self._tile(row, column)
                    tile.weight.copy_(source.weight[begin:end, start:stop])
                    if tile.bias is not None:
                        tile.bias.copy_(source.bias[begin:end])

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Return the layer's output (..., out_features) for ``input_`` (..., in_features); either may be split along
        its last dimension, as the class says."""
        if self.input_is_already_split or not isinstance(input_, torch.Tensor):
            inputs = list(input_)
        else:
            inputs = list(torch.split(input_, [stop - start for start, stop in pairwise(self.in_parts)], dim=-1))
        outputs = []
        for row in range(self.out_splits):
            total = self._tile(row, 0)(inputs[0])
            for column in range(1, self.in_splits):
                total = total + self._tile(row, column)(inputs[column])
            outputs.append(total)
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _tile(self, row: int, column: int) -> nn.Linear:
        """Return the tile ``linears[row][column]``."""
        return cast(nn.Linear, cast(nn.ModuleList, self.linears[row])[column])


def _slice_bounds(name: str, features: int, splits: int) -> list[int]:
    """Return the ``splits`` + 1 bounds of nearly equal slices of ``features``, the larger slices first. Raises
    `PartitionError` by ``name`` unless 1 <= ``splits`` <= ``features``."""
    if not 1 <= splits <= features:
        raise PartitionError(f"TiledLinear({name}={splits}): expected 1 to {features} for {features} features")
    base, extra = divmod(features, splits)
    return [base * number + min(number, extra) for number in range(splits + 1)]
