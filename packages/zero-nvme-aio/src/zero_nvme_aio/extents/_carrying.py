"""Carries the current data of sealed generations over into the open one, which is about to be sealed. A covered range
is bytes of a name that are current in one written range; a stripe is the number of a path of the store.

A generation that was written only in part leaves the rest of the state in older ones, whose files then stay because of
a few extents. Where the file system shares blocks between files, all current data is carried over: no bytes move, and a
generation holds the whole state. Elsewhere a generation is emptied by a copy through the engine once less than half of
its files is current, so that sealed files never take more than twice the space of the current data in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from .._copy import CopyRange, FileRange, copy_ranges
from .._memory import AlignedBuffer
from ._files import GenerationFiles
from ._ranges import Allocation, Covered, WrittenRange
from ._reading import check_checksum
from ._reflink import block_bytes, clone_range

__all__ = ["Carrying", "carried_bytes"]

_CHUNK_BYTES = 4 << 20

Live = Mapping[str, list[Covered]]


class _Move(NamedTuple):
    """A covered range and its allocations in the open generation."""

    covered: Covered
    allocations: list[Allocation]


class Carrying:
    """Carries current data of sealed generations over to the space in the open one that ``allocate(name, begin, end)``
    returns.

    `generations`: the files of each generation, by number. `target`: the files of the open one. `shares_blocks`: tells
    of a stripe whether its files can share blocks.

    Attributes:
        copied_bytes: the bytes that were copied rather than shared.
    """

    def __init__(
        self,
        generations: Mapping[int, GenerationFiles],
        target: GenerationFiles,
        allocate: Callable[[str, int, int], list[Allocation]],
        shares_blocks: Callable[[int], bool],
    ) -> None:
        self._generations = generations
        self._target = target
        self._allocate = allocate
        self._shares_blocks = shares_blocks
        self._to_copy: list[CopyRange] = []
        self.copied_bytes = 0

    def run(self, live: Live) -> list[WrittenRange]:
        """Carry the data over; return the ranges of the open generation that replace those of older ones, once all
        bytes have arrived. Nothing is synced.

        `live`: the covered ranges of every name, which are not changed. Raises errors of the engine, and ChecksumError
        if a partly overwritten extent was changed on disk; the state is then as before.
        """
        chosen = list(_ranges_to_carry(live, self._generations, self._target.generation, self._shares_blocks))
        pieces = [
            piece
            for covered in sorted(chosen, key=lambda c: (c.piece.generation, c.piece.stripe, c.piece.file_offset))
            for piece in self._carry_range(covered)
        ]
        copy_ranges(self._to_copy, chunk_bytes=_CHUNK_BYTES)
        self.copied_bytes += sum(copied.nbytes for copied in self._to_copy)
        return pieces

    def _carry_range(self, covered: Covered) -> Iterator[WrittenRange]:
        """Carry one covered range over and yield the ranges that replace it. A written range that is current as a whole
        and gets one allocation is shared, or put on the list of copies that `run` makes at the end; any other is
        verified and copied at once (ChecksumError if it was changed on disk).
        """
        old = covered.piece
        allocations = self._allocate(old.name, covered.begin, covered.end)
        if len(allocations) > 1 or (covered.begin, covered.end) != (old.begin, old.end):
            yield from self._copy_verified(covered, allocations)
            return
        self._share_or_copy(old, allocations[0])
        yield self._carried_range(
            old, allocations[0], old.checksum
        )  # the bytes keep the checksum that they were written with

    def _share_or_copy(self, old: WrittenRange, allocation: Allocation) -> None:
        """Share the whole blocks of a written range with its new allocation; put the bytes at its ends, or all bytes if
        none can be shared, on the list of copies that `run` makes at the end.
        """
        source, target = self._generations[old.generation], self._target
        head, shared = 0, 0
        if old.stripe == allocation.stripe and self._shares_blocks(allocation.stripe):
            target.file(allocation.stripe)
            head, shared = _whole_blocks(old, allocation, block_bytes(os.path.dirname(target.path(allocation.stripe))))
        if shared:
            begin, end = old.file_offset + head, allocation.file_offset + head
            clone_range(source.path(old.stripe), begin, target.path(allocation.stripe), end, shared)
        for begin, end in ((0, head), (head + shared, old.nbytes)):
            if begin < end:
                origin = FileRange(source.engine(old.stripe), source.file(old.stripe), old.file_offset + begin)
                goal = FileRange(
                    target.engine(allocation.stripe), target.file(allocation.stripe), allocation.file_offset + begin
                )
                self._to_copy.append(CopyRange(origin, goal, end - begin))

    def _copy_verified(self, covered: Covered, allocations: list[Allocation]) -> Iterator[WrittenRange]:
        """Copy a covered range that is only a part of its written range, or has several `allocations`, to these; yield
        the new range of each.

        The whole written range is read and verified first, so that the new checksums do not vouch for damaged bytes;
        ChecksumError if it was changed on disk.
        """
        old = covered.piece
        files = self._generations[old.generation]
        source, scratch = files.file(old.stripe), memoryview(AlignedBuffer(old.nbytes))
        request = files.engine(old.stripe).read(source, scratch, old.file_offset, checksum=True)
        request.wait()
        check_checksum(source, old, request)
        for allocation in allocations:
            part = scratch[allocation.begin - old.begin : allocation.end - old.begin]
            engine, target = self._target.engine(allocation.stripe), self._target.file(allocation.stripe)
            writing = engine.write(target, part, allocation.file_offset, checksum=True)
            writing.wait()
            self.copied_bytes += allocation.end - allocation.begin
            yield self._carried_range(old, allocation, writing.checksum or "")

    def _carried_range(self, old: WrittenRange, allocation: Allocation, checksum: str) -> WrittenRange:
        """Return the range that replaces `old`, or a part of it, with `checksum` at an allocation in the open
        generation.
        """
        nbytes = allocation.end - allocation.begin
        return WrittenRange(
            old.name,
            allocation.begin,
            nbytes,
            self._target.generation,
            allocation.stripe,
            allocation.file_offset,
            checksum=checksum,
        )


def carried_bytes(
    live: Live, generations: Mapping[int, GenerationFiles], target: int, shares_blocks: Callable[[int], bool]
) -> int:
    """Return the bytes that sealing generation number `target` would copy now; bytes whose blocks are shared are not
    copied. `live`: the covered ranges of every name. `generations`: the files of each generation, by number.
    `shares_blocks` tells of a stripe whether its files can share blocks.
    """
    return sum(
        covered.end - covered.begin
        for covered in _ranges_to_carry(live, generations, target, shares_blocks)
        if not shares_blocks(covered.piece.stripe)
    )


def _ranges_to_carry(
    live: Live, generations: Mapping[int, GenerationFiles], target: int, shares_blocks: Callable[[int], bool]
) -> Iterator[Covered]:
    """Return the covered ranges in `live` (by name) of older generations that sealing generation number `target`
    carries over: all on stripes for which `shares_blocks` is true, and those of `generations` (files, by number) of
    whose bytes less than half is current.
    """
    old = [c for covered in live.values() for c in covered if c.piece.generation != target]
    current: dict[int, int] = {}
    for covered in old:
        index = covered.piece.generation
        current[index] = current.get(index, 0) + covered.end - covered.begin
    emptied = {index for index, nbytes in current.items() if 2 * nbytes < generations[index].nbytes}
    return (c for c in old if c.piece.generation in emptied or shares_blocks(c.piece.stripe))


def _whole_blocks(old: WrittenRange, allocation: Allocation, block: int) -> tuple[int, int]:
    """Return (bytes before the first whole block of a written range, bytes in its whole blocks); (0, 0) if range and
    allocation differ in their distance to a block boundary. `block`: bytes of a block.
    """
    if (old.file_offset - allocation.file_offset) % block:
        return 0, 0
    head = min(-old.file_offset % block, old.nbytes)
    return head, (old.nbytes - head) // block * block
