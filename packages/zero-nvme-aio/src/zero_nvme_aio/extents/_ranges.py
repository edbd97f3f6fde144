"""Which bytes of a name are current, and where they lie in files: interval arithmetic, no I/O. A stripe is the number
of a path of the store, from 0; a generation is what is written between two seals, and the last one is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .._request import Request
    from ._paths import StorePaths
    from ._transfer import PathRead

__all__ = ["Allocation", "Allocator", "Covered", "WrittenRange", "cover", "overlay"]

PAGE = 4096


class WrittenRange:
    """Bytes [begin, begin + nbytes) of `name`, written in one go at `file_offset` of the file of one generation and
    stripe.

    `checksum`: of the range if it is known, else empty. `request`: the write that carried the bytes, under way or
    ended, if this process wrote them; None if the range was loaded or carried over from another generation.
    """

    __slots__ = ("_checksum", "_partial", "begin", "file_offset", "generation", "name", "nbytes", "request", "stripe")

    def __init__(
        self, name: str, begin: int, nbytes: int, generation: int, stripe: int, file_offset: int, checksum: str = ""
    ) -> None:
        self.name = name
        self.begin = begin
        self.nbytes = nbytes
        self.generation = generation
        self.stripe = stripe
        self.file_offset = file_offset
        self.request: Request | PathRead | None = None
        self._checksum = checksum
        self._partial = False

    @property
    def end(self) -> int:
        """Return the offset in the name behind the range's last byte."""
        return self.begin + self.nbytes

    @property
    def checksum(self) -> str:
        """Return the checksum of the range, from its write if that has ended with one. Empty if it is not known: while
        the write is under way, and for a `part` of a range until it is set.
        """
        if not self._checksum and self.request is not None and not self._partial:
            self._checksum = self.request.checksum or ""
        return self._checksum

    @checksum.setter
    def checksum(self, value: str) -> None:
        """Record the checksum; an empty one is looked up in the request again."""
        self._checksum = value

    def part(self, begin: int, end: int) -> WrittenRange:
        """Return the sub-range [begin, end) of this one (offsets in the name) as a range of its own, at the same offset
        of the file, with the same write; its checksum is empty until it is set.
        """
        part = WrittenRange(
            self.name, begin, end - begin, self.generation, self.stripe, self.file_offset + begin - self.begin
        )
        part.request = self.request  # whether the bytes arrived is known from the write that carried them
        part._partial = True
        return part


class Covered(NamedTuple):
    """Bytes [begin, end) of a name are current in the written range `piece`, which may be larger."""

    begin: int
    end: int
    piece: WrittenRange


def overlay(current: list[Covered], new: WrittenRange, open_generation: int) -> list[Covered]:
    """Return the coverage of a name after `new` was written over `current`: which written range holds which bytes, in
    order of offset. `current` is not changed.

    What remains of partly overwritten ranges of sealed generations is a smaller part of the same range. Ranges of
    generation number `open_generation` are overwritten in the file too, so what remains of them becomes ranges of their
    own, whose checksums are computed when they are sealed.
    """
    out = []
    for covered in current:
        for begin, end in ((covered.begin, min(covered.end, new.begin)), (max(covered.begin, new.end), covered.end)):
            if begin >= end:
                continue
            piece = covered.piece
            whole = (begin, end) == (piece.begin, piece.end)
            if piece.generation == open_generation and not whole:
                piece = piece.part(begin, end)
            out.append(Covered(begin, end, piece))
    out.append(Covered(new.begin, new.end, new))
    return sorted(out, key=lambda covered: covered.begin)


def cover(current: list[Covered], begin: int, end: int) -> Iterator[Covered | tuple[int, int]]:
    """Yield what holds bytes [begin, end) of a name, in order, clipped to them: `Covered` ranges, and (begin, end)
    pairs for bytes that were never written. `current`: the coverage of the name, in order.
    """
    position = begin
    for covered in current:
        low, high = max(covered.begin, begin), min(covered.end, end)
        if low >= high:
            continue
        if position < low:
            yield (position, low)
        yield Covered(low, high, covered.piece)
        position = high
    if position < end:
        yield (position, end)


class Allocation(NamedTuple):
    """Space of the open generation for bytes [begin, end) of a name: from `file_offset` of the file on path number
    `stripe` on.
    """

    begin: int
    end: int
    stripe: int
    file_offset: int


class Allocator:
    """Allocates file space of one generation, on `paths` in units of `stripe_bytes`, from `first_offset` of each file
    on.

    An allocation has the same distance to a page boundary as the bytes it is for, so that page-aligned memory for a
    page-aligned range needs no copy.

    Attributes:
        ends: the end of the space allocated in each file, in bytes, by stripe.
    """

    def __init__(self, paths: StorePaths, stripe_bytes: int, first_offset: int) -> None:
        self.stripe_bytes = stripe_bytes
        self.ends = [first_offset] * len(paths)
        self._paths = paths
        self._allocations: dict[str, list[Allocation]] = {}
        self._free: dict[tuple[int, int, int], list[int]] = {}  # (stripe, bytes, distance to a page) -> file offsets

    def reserve(self, name: str, nbytes: int) -> None:
        """Allocate space for all `nbytes` of a name at once; do nothing if the name has space in this generation."""
        if name not in self._allocations:
            self.allocate(name, 0, nbytes)

    def allocate(self, name: str, begin: int, end: int, avoided: Set[int] = frozenset()) -> list[Allocation]:
        """Return allocations for new content of bytes [begin, end) of a name, in order: those that the bytes already
        have in this generation, unless their path is to be left or their stripe is `avoided`, and new ones for the
        others.
        """
        out, position = [], begin
        for known in tuple(self._allocations.setdefault(name, [])):
            low, high = max(known.begin, begin), min(known.end, end)
            if low >= high:
                continue
            out += self._allocate_new(name, position, low)
            entirely = (low, high) == (known.begin, known.end)
            if known.stripe in avoided or self._paths.should_move(known.stripe, high - low, entirely=entirely):
                self._give_up(name, known, low, high)
                out += self._allocate_new(name, low, high)
                if entirely:
                    key = (known.stripe, high - low, known.file_offset % PAGE)
                    self._free.setdefault(key, []).append(known.file_offset)
            else:
                out.append(Allocation(low, high, known.stripe, known.file_offset + low - known.begin))
            position = high
        out += self._allocate_new(name, position, end)
        return out

    def reallocate(self, name: str, begin: int, end: int) -> Allocation:
        """Return a new allocation for bytes [begin, end) of a name, which have a single one; the old one could not be
        written and is never used again.
        """
        for known in tuple(self._allocations[name]):
            low, high = max(known.begin, begin), min(known.end, end)
            if low < high:
                self._give_up(name, known, low, high)
        (allocation,) = self._allocate_new(name, begin, end)
        return allocation

    def _give_up(self, name: str, known: Allocation, low: int, high: int) -> None:
        """Take bytes [low, high) out of an allocation of a name, `known`; the rest of it stays allocated."""
        self._allocations[name].remove(known)
        for begin, end in ((known.begin, low), (high, known.end)):
            if begin < end:
                self._allocations[name].append(
                    Allocation(begin, end, known.stripe, known.file_offset + begin - known.begin)
                )

    def _allocate_new(self, name: str, begin: int, end: int) -> list[Allocation]:
        """Return new allocations for bytes [begin, end) of a name, one per unit of a stripe; none if the range is
        empty.
        """
        new = []
        while begin < end:
            unit = begin // self.stripe_bytes
            stop = end if len(self._paths) == 1 else min(end, (unit + 1) * self.stripe_bytes)
            stripe = self._paths.choose(name, unit, stop - begin)
            free = self._free.get((stripe, stop - begin, begin % PAGE))
            if free:
                offset = free.pop()
            else:
                offset = -(-self.ends[stripe] // PAGE) * PAGE + begin % PAGE
                self.ends[stripe] = offset + stop - begin
            new.append(Allocation(begin, stop, stripe, offset))
            begin = stop
        if new:
            self._allocations[name] = sorted([*self._allocations.get(name, []), *new])
        return new
