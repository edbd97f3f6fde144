"""Squared norms of shards in float64: added in a fixed order, or added exactly over blocks that no shard splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .host_facts import is_fake

_BLOCK = 1 << 16
GRID = 256
"""Elements in a block whose squares are added in a fixed order; under virtual ranks shards consist of whole blocks."""

_SCALE = 1127  # bits behind the binary point of an exact sum: float64's last, and its mantissa in front of that
_MANTISSA = 53
_LOW = 26
_SUMS = 32


class NormSquared(Protocol):
    """Returns the sum of squares of a 1-D floating tensor, accumulated in float64; NaN if an element is NaN, inf if one
    is infinite."""

    def __call__(self, x: torch.Tensor) -> float:
        """Return the sum of squares of ``x`` (1-D)."""


def norm_squared(x: torch.Tensor) -> float:
    """Return the sum of squares of ``x`` by plain torch (a `NormSquared`): on the CPU blocks of 65,536 elements, added
    in order, in float64; elsewhere torch's own norm, squared (float32 on MPS). Waits for an accelerator."""
    if x.device.type != "cpu":
        wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS lacks float64
        norm = float(torch.linalg.vector_norm(x, dtype=wide))
        return norm * norm
    total = 0.0
    for start in range(0, x.numel(), _BLOCK):
        block = x[start : start + _BLOCK].double()
        total += float(torch.dot(block, block))
    return total


class ExactSum:
    """A sum of non-negative float64 numbers without rounding, so that their order and grouping do not matter. `of`
    makes one of numbers, `of_parts` of those that `parts` returned.

    `float` rounds it once. It is NaN or inf if a number in it is. ``units``: the sum as a multiple of the smallest
    number that it can hold; ``special``: inf or NaN in place of that, 0 for none.
    """

    __slots__ = ("_special", "_units")

    def __init__(self, units: int = 0, special: float = 0.0) -> None:
        self._units = units  # of 2**-_SCALE
        self._special = special  # 0, inf or NaN

    @classmethod
    def of(cls, values: torch.Tensor) -> ExactSum:
        """Return the exact sum of ``values``, a 1-D float64 tensor of non-negative numbers; waits for its device. 1 for
        a fake tensor: in a dry run, which has no values, a norm of 1 is as good as any."""
        if is_fake(values):
            return cls(1 << _SCALE)
        special = float(values[~values.isfinite()].sum())
        if special != 0.0:
            return cls(special=special)
        mantissas, exponents = torch.frexp(values.cpu())
        whole = (mantissas * 2.0**_MANTISSA).to(torch.int64)
        least = int(exponents.min()) if exponents.numel() else 0
        places = (exponents - least).to(torch.int64)
        bins = torch.zeros(2, int(places.max()) + 1 if places.numel() else 1, dtype=torch.int64)
        bins[0].index_add_(0, places, whole & ((1 << _LOW) - 1))
        bins[1].index_add_(0, places, whole >> _LOW)
        units = 0
        for place, (low, high) in enumerate(zip(*bins.tolist(), strict=True)):
            units += ((high << _LOW) + low) << place
        return cls(units << (least - _MANTISSA + _SCALE))

    @classmethod
    def of_parts(cls, parts: Sequence[float]) -> ExactSum:
        """Return the exact sum of ``parts``, the results of one or several calls of `parts` in one sequence."""
        return cls.of(torch.tensor(list(parts), dtype=torch.float64))

    def parts(self) -> list[float]:
        """Return float64 numbers whose exact sum this is, to be sent to other ranks; [inf] if it is too large or inf,
        [NaN] if it is NaN."""
        if self._special != 0.0:
            return [self._special]
        found, units = [], self._units
        while units:
            shift = max(units.bit_length() - _MANTISSA, 0)
            top = units >> shift
            if shift - _SCALE + _MANTISSA > 1024:
                return [math.inf]
            found.append(math.ldexp(float(top), shift - _SCALE))
            units -= top << shift
        return found

    def __add__(self, other: ExactSum) -> ExactSum:
        """Return the exact sum of this one and ``other``."""
        return ExactSum(self._units + other._units, self._special + other._special)

    def __float__(self) -> float:
        """Return the sum as the nearest float64 number; inf if it is too large."""
        if self._special != 0.0:
            return self._special
        try:
            return self._units / (1 << _SCALE)  # Python rounds the quotient of two integers correctly
        except OverflowError:
            return math.inf


class GridSquares(Protocol):
    """Returns the sum of squares of each block of `GRID` elements of a 1-D floating tensor, in float64.

    The tensor consists of whole blocks. Element i of a block is added to sum i mod 32, in the order of i, and the 32
    sums are added in halves. Every addition is elementwise, so the bits are the same on any device and at any vector
    width.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums of squares (1-D, float64) of the blocks of `GRID` elements of ``x`` (1-D, whole blocks)."""


def grid_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each block of `GRID` elements of ``x`` by plain torch (a `GridSquares`), on its
    device."""
    blocks = [x.new_empty(0, dtype=torch.float64)]
    for start in range(0, x.numel(), _BLOCK):
        squares = x[start : start + _BLOCK].double().square().view(-1, GRID // _SUMS, _SUMS)
        sums = squares[:, 0].clone()
        for row in range(1, GRID // _SUMS):
            sums += squares[:, row]
        while (half := sums.shape[1] // 2) > 0:
            sums = sums[:, :half] + sums[:, half:]
        blocks.append(sums.view(-1))
    return torch.cat(blocks)


class GridNorm:
    """Computes the squared norm of a 1-D shard of whole blocks: the exact sum of the blocks' ``squares``."""

    def __init__(self, squares: GridSquares = grid_squares) -> None:
        self._squares = squares

    def __call__(self, x: torch.Tensor) -> ExactSum:
        """Return the sum of squares of ``x`` (1-D, whole blocks of `GRID` elements), rounded within its blocks only."""
        return ExactSum.of(self._squares(x))


class NormSums(Protocol):
    """Adds the ranks' sums of squares: each rank sends `pack` of its own, and all compute the same `total` of what they
    get."""

    def zero(self) -> Any:
        """Return the sum of squares of nothing, in the form that `pack` takes and that can be added to others."""

    def pack(self, square: Any) -> Any:
        """Return a rank's sum of squares, ``square``, as plain data, to be sent."""

    def total(self, packed: Sequence[Any]) -> float:
        """Return the total of the ranks' sums; the same on every rank. ``packed``: by rank, what `pack` returned
        there."""


class RankOrderSums:
    """`NormSums` of floats, added in rank order."""

    def zero(self) -> float:
        """Return 0."""
        return 0.0

    def pack(self, square: float) -> float:
        """Return ``square`` itself."""
        return square

    def total(self, packed: Sequence[float]) -> float:
        """Return the total of ``packed``, added in rank order and rounded after each addition."""
        return sum(packed, start=0.0)


class ExactSums:
    """`NormSums` of `ExactSum`s, rounded once at the end."""

    def zero(self) -> ExactSum:
        """Return an exact 0."""
        return ExactSum()

    def pack(self, square: ExactSum) -> list[float]:
        """Return float64 numbers whose exact sum is ``square``."""
        return square.parts()

    def total(self, packed: Sequence[Sequence[float]]) -> float:
        """Return the exact total of all numbers in ``packed``, rounded once."""
        return float(ExactSum.of_parts([part for parts in packed for part in parts]))
