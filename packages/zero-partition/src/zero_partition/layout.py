"""The elements that each rank owns: pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LayoutEntry:
    """One parameter's place in its unit's flat buffer; ``offset`` and ``numel`` in elements.

    ``name``: the parameter's name in the model.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Return the parameter's number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Return the index of the first element behind the parameter in the unit's flat buffer."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that lies in one rank's shard (offsets and length in elements).

    ``entry``: the parameter. ``param_offset``: first element within the flattened parameter; ``shard_offset``: within
    the shard of ``rank``.
    """

    entry: LayoutEntry
    rank: int
    param_offset: int
    shard_offset: int
    length: int


@dataclass(frozen=True)
class UnitLayout:
    """The flat buffer of one unit: entries in order, padded so that every rank owns an equal, aligned shard.

    ``world_size``: number of shards. ``shard_numel``: elements of each.
    """

    name: str
    entries: tuple[LayoutEntry, ...]
    world_size: int
    shard_numel: int

    @classmethod
    def from_shapes(
        cls,
        name: str,
        shapes: Mapping[str, Sequence[int]],
        world_size: int,
        alignment: int = 1,
        *,
        entry_alignment: int = 1,
    ) -> UnitLayout:
        """Return the layout of the unit ``name`` for parameters ``shapes`` (name -> shape), in the order given.

        ``world_size``: number of shards. ``alignment``: shard boundaries are multiples of this, in elements.
        ``entry_alignment``: parameters begin at multiples of this. Raises ValueError when one of the three is below 1.
        """
        if min(world_size, alignment, entry_alignment) < 1:
            got = f"{world_size}, {alignment} and {entry_alignment}"
            raise ValueError(f"unit '{name}': expected world_size and alignments >= 1, got {got}")
        entries, offset = [], 0
        for parameter, shape in shapes.items():
            entry = LayoutEntry(parameter, tuple(shape), -(-offset // entry_alignment) * entry_alignment)
            entries.append(entry)
            offset = entry.end
        shard = -(-offset // (world_size * alignment)) * alignment
        return cls(name, tuple(entries), world_size, shard)

    @property
    def numel(self) -> int:
        """Return the number of elements of the flat buffer, padding included."""
        return self.shard_numel * self.world_size

    @cached_property
    def used_numel(self) -> int:
        """Return the number of elements of the flat buffer that belong to parameters."""
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the range (first element, end) of every part of the flat buffer that belongs to no parameter, padding
        at the end included."""
        ends = [0, *(entry.end for entry in self.entries)]
        starts = [*(entry.offset for entry in self.entries), self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the range (first element, end) of the shard of ``rank`` in the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def name_at(self, position: int) -> str:
        """Return the name of the parameter at element ``position`` of the flat buffer: in a gap that of the next
        parameter, behind the last parameter its name."""
        return next((entry.name for entry in self.entries if position < entry.end), self.entries[-1].name)

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """Yield the fragments that ``rank`` owns, in the order of parameters; empty parameters have none."""
        for entry in self.entries:
            fragment = self.fragment_of(entry, rank)
            if fragment is not None:
                yield fragment

    def fragment_of(self, entry: LayoutEntry, rank: int) -> Fragment | None:
        """Return the fragment of the parameter ``entry``, one of this layout's, that ``rank`` owns; None if it owns
        none."""
        start, end = self.shard_range(rank)
        low, high = max(start, entry.offset), min(end, entry.end)
        return Fragment(entry, rank, low - entry.offset, low - start, high - low) if low < high else None


def element_positions(units: Iterable[UnitLayout], alignment: int) -> dict[str, int]:
    """Return, for each parameter name, the position of its first element among the elements of all ``units``.

    Each unit, in the order given, begins at a multiple of ``alignment`` elements; padding of shards does not count, so
    positions are the same at any world size. Every unit must have a parameter.
    """
    positions: dict[str, int] = {}
    base = 0
    for unit in units:
        positions |= {entry.name: base + entry.offset for entry in unit.entries}
        base += -(-unit.entries[-1].end // alignment) * alignment
    return positions


@dataclass(frozen=True)
class Layout:
    """The map from parameter name to (unit, offset, length, shape) for a full model."""

    units: tuple[UnitLayout, ...]

    @cached_property
    def _by_name(self) -> dict[str, tuple[UnitLayout, LayoutEntry]]:
        """Return, by parameter name, (the parameter's unit, its entry there)."""
        return {entry.name: (unit, entry) for unit in self.units for entry in unit.entries}

    def find(self, parameter: str) -> tuple[UnitLayout, LayoutEntry]:
        """Return (unit, entry in it) of the parameter called ``parameter``. Raises KeyError for an unknown name."""
        try:
            return self._by_name[parameter]
        except KeyError:
            raise KeyError(f"no parameter '{parameter}' in the layout ({len(self._by_name)} parameters)") from None

    @property
    def numel(self) -> int:
        """Return the number of elements of all flat buffers, padding included."""
        return sum(unit.numel for unit in self.units)

    @property
    def used_numel(self) -> int:
        """Return the number of elements that belong to parameters."""
        return sum(unit.used_numel for unit in self.units)
