"""Tiers of masters and moments. A tier hands out one slice after the other and keeps what was changed.

A span is consecutive elements of a fragment; a slice is the spans that are updated together; its index is its position
in the list of slices. A kind is one tensor of state: ``master``, a moment, or the scales of an 8-bit moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch

from .._memory import HostBlock
from .._protocols import Extent, Generation, PathUse
from ..ends import HostUse
from ._slices import Slice

__all__ = [
    "DeviceTier",
    "HostTier",
    "LoadedSlice",
    "SpanTensors",
    "SplitTier",
    "Tier",
    "host_bytes",
]

SpanTensors = dict[str, torch.Tensor]  # of one span, by kind


class LoadedSlice(NamedTuple):
    """One slice in memory: its index (``number``), and for each of its spans, in order, the tensors of state
    by kind.
    """

    number: int
    tensors: list[SpanTensors]


class Tier(Protocol):
    """Keeps the slices of one update. The content of a slice that was never visited with ``dirty`` is arbitrary."""

    def order(self, indices: Sequence[int]) -> list[int]:
        """Return slice indices, given in ascending order, in the order in which visiting them costs the fewest
        transfers.
        """

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        """Yield the slices with these indices in turn, each valid until the next one is requested. With ``dirty`` the
        caller changes each slice, and the tier keeps the changes.

        Iterate to the end, or close the iterator, which loses the changes to the current slice. ShardError if a slice
        cannot be read or an earlier one not written.
        """

    def reset(self) -> None:
        """Discard the content of every slice, which is arbitrary then, and the errors of failed transfers."""

    def memory(self) -> dict[str, int]:
        """Return the bytes held, by what holds them: ``states`` or ``ring`` (buffers) in host memory, ``nvme`` in
        files, ``device`` on the device.
        """

    def bytes_written(self) -> int:
        """Return the bytes written to drives so far."""

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder of the files, the bytes written and read so far, its speed and its state; empty
        without files.
        """

    def flush(self) -> None:
        """Block until every slice has reached the tier; raise the first write that failed."""

    def carried_bytes(self) -> int:
        """Return the bytes that `seal` would copy now: data not written since the last seal."""

    def seal(self, *, durable: bool) -> Generation | None:
        """End the current generation of the files, which are never written again, and return it; None if there are no
        files. With ``durable`` it survives a crash.
        """

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        """Return, for each ``<fragment>/<kind>``, the extents (path, offset, bytes, checksum) that hold it in files;
        what is in memory is left out.
        """

    def close(self) -> None:
        """Free the memory and remove the files."""


def host_bytes(slices: Sequence[Slice]) -> int:
    """Return the bytes of all states of these slices: exactly the host memory of a `HostTier` with them."""
    return sum(kind.nbytes(span.length) for slice_ in slices for span in slice_ for kind in span.fragment.kinds)


class HostTier:
    """A `Tier` in one block of host memory of exactly the size of its content, the states of ``slices``.

    ``on_device``: the block counts as device memory, because its content is not offloaded and the device is the CPU.
    """

    def __init__(self, slices: Sequence[Slice], *, on_device: bool = False) -> None:
        self._on_device = on_device
        parts = tuple((span.fragment.name, span.fragment.nbytes(span.length)) for slice_ in slices for span in slice_)
        use = HostUse("masters and optimizer states", on_device=on_device, parts=parts)
        self._nbytes = host_bytes(slices)
        self._block = HostBlock(self._nbytes, use)
        self._set_own_tensors([[{} for _ in slice_] for slice_ in slices])
        places = [
            (kind, span, self._own[index][number])
            for index, slice_ in enumerate(slices)
            for number, span in enumerate(slice_)
            for kind in span.fragment.kinds
        ]
        position = 0
        # Widest first, so that every tensor is aligned without padding.
        for kind, span, tensors in sorted(places, key=lambda place: -place[0].dtype.itemsize):
            tensors[kind.name] = self._block.view(position, kind.items(span.length), kind.dtype)
            position += kind.nbytes(span.length)

    def _set_own_tensors(self, own: list[list[SpanTensors]]) -> None:
        """Set the tensors that this tier has allocated, by kind, for each span of each slice; every `reset` comes back
        to them.
        """
        self._own, self._tensors = own, [list(tensors) for tensors in own]

    def order(self, indices: Sequence[int]) -> list[int]:
        """Return the indices in the given order, since no order costs fewer transfers: there are none."""
        return list(indices)

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        """Yield the slices with these indices in turn, as the tier's own tensors. Changes are made in place and stay,
        so ``dirty`` makes no difference.
        """
        for index in indices:
            yield LoadedSlice(index, self._tensors[index])

    def tensors(self, index: int, number: int) -> SpanTensors:
        """Return the tensors, by kind, of span number ``number`` of the slice ``index``, valid until they are
        exchanged.
        """
        return self._tensors[index][number]

    def exchange(self, index: int, number: int, tensors: SpanTensors) -> SpanTensors:
        """Make ``tensors``, by kind and of the same sizes, those of span number ``number`` of the slice ``index`` from
        now on; return those that it had before. Nothing is copied.
        """
        before, self._tensors[index][number] = self._tensors[index][number], tensors
        return before

    def reset(self) -> None:
        """Undo every `exchange`, also one that was interrupted; the content of every slice is arbitrary then. The
        caller also resets the tier with which tensors were exchanged.
        """
        self._set_own_tensors(self._own)

    def memory(self) -> dict[str, int]:
        """Return the bytes of the states as ``states``, or as ``device`` if they count as device memory; ``ring`` and
        ``nvme`` are 0.
        """
        states, device = (0, self._nbytes) if self._on_device else (self._nbytes, 0)
        return {"states": states, "ring": 0, "nvme": 0, "device": device}

    def bytes_written(self) -> int:
        """Return 0: there are no files."""
        return 0

    def path_use(self) -> Sequence[PathUse]:
        """Return an empty sequence: there are no files."""
        return ()

    def flush(self) -> None:
        """Do nothing: no transfer is under way."""

    def carried_bytes(self) -> int:
        """Return 0: there are no files."""
        return 0

    def seal(self, *, durable: bool) -> None:
        """Return None, since there are no files; ``durable`` makes no difference."""
        return None

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        """Return an empty mapping: there are no files."""
        return {}

    def close(self) -> None:
        """Free the block; tensors over it keep it alive."""
        self._set_own_tensors([])
        self._nbytes, self._block = 0, HostBlock(0, HostUse("nothing"))


class DeviceTier(HostTier):
    """A `Tier` in the memory of an accelerator, ``device``, for ``slices`` that are not offloaded. Each state is a
    tensor of its own, aligned as the device's allocator does it.
    """

    def __init__(self, slices: Sequence[Slice], device: torch.device) -> None:
        super().__init__((), on_device=True)
        self._nbytes = host_bytes(slices)
        self._set_own_tensors(
            [
                [
                    {k.name: torch.empty(k.items(s.length), dtype=k.dtype, device=device) for k in s.fragment.kinds}
                    for s in slice_
                ]
                for slice_ in slices
            ]
        )


class SplitTier:
    """A `Tier` that keeps the first ``count`` slices on the tier ``first`` and the others on ``rest``, whose own
    indices begin with 0. Only ``first`` may have files. ``rest_first``: `order` begins with the slices on ``rest``.
    """

    def __init__(self, first: Tier, rest: Tier, count: int, *, rest_first: bool = False) -> None:
        self._first = first
        self._rest = rest
        self._count = count
        self._rest_first = rest_first

    def order(self, indices: Sequence[int]) -> list[int]:
        """Return the indices of the slices on ``first``, in the order of that tier, and behind them (with
        ``rest_first`` before them) the others as they are.
        """
        first = self._first.order([i for i in indices if i < self._count])
        rest = [i for i in indices if i >= self._count]
        return rest + first if self._rest_first else first + rest

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        """Yield the slices with these indices in turn, each valid until the next one is requested; with ``dirty`` the
        tiers keep what the caller changes. Successive indices on the same tier are one visit of that tier.
        """
        for on_first, run in groupby(indices, lambda index: index < self._count):
            if on_first:
                yield from self._first.visit(list(run), dirty=dirty)
                continue
            for visit in self._rest.visit([index - self._count for index in run], dirty=dirty):
                yield LoadedSlice(visit.number + self._count, visit.tensors)

    def in_memory(self, index: int) -> tuple[HostTier, int] | None:
        """Return (the tier that keeps the slice ``index`` in host or device memory, the slice's index on that tier);
        None if the slice is in files.
        """
        part, inside = (self._first, index) if index < self._count else (self._rest, index - self._count)
        return (part, inside) if isinstance(part, HostTier) else None

    def reset(self) -> None:
        """Reset both tiers."""
        self._first.reset()
        self._rest.reset()

    def memory(self) -> dict[str, int]:
        """Return the bytes of both tiers together, by what holds them: ``states``, ``ring``, ``nvme`` and
        ``device``.
        """
        first, rest = self._first.memory(), self._rest.memory()
        return {what: first[what] + rest[what] for what in first}

    def bytes_written(self) -> int:
        """Return the bytes that both tiers have written to files since the start."""
        return self._first.bytes_written() + self._rest.bytes_written()

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder of the first tier, which alone can have files, the bytes written and read so far, its
        speed and its state.
        """
        return self._first.path_use()

    def flush(self) -> None:
        """Flush both tiers."""
        self._first.flush()
        self._rest.flush()

    def carried_bytes(self) -> int:
        """Return the bytes that `seal` would copy now, all on the first tier."""
        return self._first.carried_bytes()

    def seal(self, *, durable: bool) -> Generation | None:
        """End the current generation of the first tier's files and return it, None if that tier has no files; the other
        tier never has any. With ``durable`` the generation survives a crash.
        """
        return self._first.seal(durable=durable)

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        """Return, for each ``<fragment>/<kind>`` of either tier, the extents (path, offset, bytes, checksum) that hold
        it in files; what is in memory is left out.
        """
        return {**self._first.extents(), **self._rest.extents()}

    def close(self) -> None:
        """Close both tiers."""
        self._first.close()
        self._rest.close()
