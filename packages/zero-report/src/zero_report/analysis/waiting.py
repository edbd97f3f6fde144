"""Why ranks waited: every wait is followed to the rank, tier, data loader or link that it was for.

[Note: following a wait] A collective is over for nobody before its last rank has started it. Until then the others wait
for that rank; after that, for the link. What the last rank did meanwhile is the reason: it waited for its data, for a
tier, for a checkpoint, for another collective (which is followed in turn), or it computed. Clocks of ranks on different
hosts are those of the hosts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..record.reader import Block, Span
from ..record.schema import COLLECTIVES, TIERS, SpanKind

_DEPTH = 6  # collectives that are followed from one to the next
CauseKind = Literal["data", "tier", "rank", "link", "save"]


class Cause(NamedTuple):
    """Why a rank lost time. ``rank``: whose data loader, tier, checkpoint or computing; -1 for a link. ``name``: what
    of a tier, or which link; what a rank did while others waited."""

    kind: CauseKind
    rank: int
    name: str


@dataclass(frozen=True)
class Loss:
    """Microseconds that ``rank`` lost in ``step`` for ``cause``, while it waited in ``span`` (None: it was not in
    one)."""

    rank: int
    step: int
    span: Span
    cause: Cause
    us: float


class _Idle(NamedTuple):
    begin: float
    end: float
    span: Span


class _RankStep:
    """One rank in one step: its collectives by place, and when it did not compute; absolute microseconds."""

    def __init__(self, block: Block, origin: float) -> None:
        self.block = block
        self.offset = (block.began - origin) * 1e6
        self.starts: dict[tuple[int, str, int], float] = {}
        self.keys: dict[Span, tuple[int, str, int]] = {}
        seen: dict[tuple[int, str], int] = {}
        idle: list[_Idle] = []
        for span in block.spans:
            end = span.end + self.offset
            if span.kind in COLLECTIVES:
                place = seen[(span.kind, span.name)] = seen.get((span.kind, span.name), -1) + 1
                key = (span.kind, span.name, place)
                self.starts[key] = span.begin + self.offset
                self.keys[span] = key
            if span.kind in (SpanKind.DATA, SpanKind.SAVE):
                idle.append(_Idle(span.begin + self.offset, end, span))
            elif span.waited and (span.kind in COLLECTIVES or span.kind in TIERS):
                idle.append(_Idle(end - span.waited, end, span))
        self.idle = sorted(idle, key=lambda item: item.begin)
        self._begins = [item.begin for item in self.idle]
        self._phases = [s for s in block.spans if s.kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.UPDATE)]

    def during(self, begin: float, end: float) -> Iterator[tuple[float, float, Span | None]]:
        """Yield what the rank did from ``begin`` to ``end``: pieces with the span that it waited in, None where it
        computed."""
        at = begin
        for item in self.idle[max(0, bisect_right(self._begins, begin) - 1) :]:
            if item.begin >= end:
                break
            if item.end <= at:
                continue
            if item.begin > at:
                yield at, item.begin, None
                at = item.begin
            yield at, min(end, item.end), item.span
            at = min(end, item.end)
        if at < end:
            yield at, end, None

    def phase_at(self, moment: float) -> str:
        """Return which part of the step the rank was in."""
        inside = moment - self.offset
        for span in self._phases:
            if span.begin <= inside <= span.end:
                return SpanKind(span.kind).name.lower()
        return "between passes"


def losses(step: int, blocks: Mapping[int, Block]) -> Iterator[Loss]:
    """Yield every microsecond that the ranks waited in one step, with its cause; ``blocks`` by rank."""
    if blocks:
        yield from _Step(step, blocks).losses()


class _Step:
    def __init__(self, step: int, blocks: Mapping[int, Block]) -> None:
        self.step = step
        origin = min(block.began for block in blocks.values())
        self.ranks = {rank: _RankStep(block, origin) for rank, block in blocks.items()}
        self.last: dict[tuple[int, str, int], tuple[float, int]] = {}
        for rank, rank_step in self.ranks.items():
            for key, start in rank_step.starts.items():
                self.last[key] = max(self.last.get(key, (start, rank)), (start, rank))

    def losses(self) -> Iterator[Loss]:
        for rank, rank_step in self.ranks.items():
            for item in rank_step.idle:
                for cause, us in self._follow(rank, item.span, item.begin, item.end, _DEPTH):
                    yield Loss(rank, self.step, item.span, cause, us)

    def _follow(self, rank: int, span: Span, begin: float, end: float, depth: int) -> Iterator[tuple[Cause, float]]:
        """Yield why ``rank`` was in ``span`` from ``begin`` to ``end``."""
        if span.kind == SpanKind.DATA:
            yield Cause("data", rank, span.name), end - begin
        elif span.kind == SpanKind.SAVE:
            yield Cause("save", rank, span.name), end - begin
        elif span.kind in TIERS:
            yield Cause("tier", rank, span.name), end - begin
        else:
            key = self.ranks[rank].keys[span]
            start, last = self.last[key]
            until = min(end, start) if last != rank else begin
            if until > begin:
                yield from self._blame(last, begin, until, depth)
            if end > max(begin, until):
                yield Cause("link", -1, SpanKind(span.kind).name.lower()), end - max(begin, until)

    def _blame(self, rank: int, begin: float, end: float, depth: int) -> Iterator[tuple[Cause, float]]:
        """Yield what ``rank`` did from ``begin`` to ``end``, while others waited for it."""
        rank_step = self.ranks[rank]
        for piece_begin, piece_end, span in rank_step.during(begin, end):
            if span is not None and depth:
                yield from self._follow(rank, span, piece_begin, piece_end, depth - 1)
            else:
                phase = rank_step.phase_at((piece_begin + piece_end) / 2)
                yield Cause("rank", rank, phase), piece_end - piece_begin
