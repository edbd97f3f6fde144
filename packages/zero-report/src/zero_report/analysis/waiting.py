"""The causes of waits: every wait is traced to the rank, tier, data loader, checkpoint or link that caused it.

[Note: tracing a wait] No rank can finish a collective before the last rank has started it. Until then the others wait
for that rank; after that, for the link. The cause is what the last rank did in the meantime: it waited for its data,
for a tier, for a checkpoint or for another collective (which is traced in turn), or it computed. Times of ranks on
different hosts are compared as they are, by each host's own clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..record.parsing import Block, Span
from ..record.schema import COLLECTIVES, TIERS, SpanKind

_MAX_DEPTH = 6  # length of a chain of collectives that wait for one another
CauseKind = Literal["data", "tier", "rank", "link", "save"]


class Cause(NamedTuple):
    """The cause of a loss. ``rank``: the rank whose data loader, tier, checkpoint or computation it was; -1 for a link.
    ``name``: of the tier's span or of the link; for kind "rank" the phase that the rank was in while others waited.
    """

    kind: CauseKind
    rank: int
    name: str


@dataclass(frozen=True)
class Loss:
    """Microseconds (``us``) that ``rank`` lost in ``step`` by ``cause``, while it waited in ``span``."""

    rank: int
    step: int
    span: Span
    cause: Cause
    us: float


class _Idle(NamedTuple):
    """A time in which a rank waited in ``span``; in microseconds since the step's origin."""

    begin: float
    end: float
    span: Span


class _RankStep:
    """One rank in one step: when it started its collectives and when it waited, in microseconds since ``origin``.

    ``block`` has the step's spans; ``origin`` is in Unix seconds, the same for all ranks. A collective's key is (kind,
    name, how many of this kind and name came before); it is the same on all ranks.

    Attributes:
        starts: start of each collective, by key. keys: key of each collective's span. idle: waits, by begin.
    """

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

    def activities(self, begin: float, end: float) -> Iterator[tuple[float, float, Span | None]]:
        """Yield the rank's activities from ``begin`` to ``end`` as (begin, end, span that it waited in), in order and
        without gaps.

        Times are in microseconds since the origin; the span is None while the rank computed.
        """
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
        """Return the phase of the step at ``moment``, microseconds since the origin: "forward", "backward", "update" or
        "between passes"."""
        inside = moment - self.offset
        for span in self._phases:
            if span.begin <= inside <= span.end:
                return SpanKind(span.kind).name.lower()
        return "between passes"


def losses(step: int, blocks: Mapping[int, Block]) -> Iterator[Loss]:
    """Yield the losses of all ranks in one step, which add up to the time they waited; none without spans.

    ``blocks``: the step's spans by rank. A wait of several causes is several losses.
    """
    if blocks:
        yield from _StepWaits(step, blocks).losses()


class _StepWaits:
    """The waits of all ranks in one step; ``blocks``: the step's spans by rank, at least one.

    Attributes:
        last: start and rank of each collective's last rank, by the collective's key.
    """

    def __init__(self, step: int, blocks: Mapping[int, Block]) -> None:
        self.step = step
        origin = min(block.began for block in blocks.values())
        self.ranks = {rank: _RankStep(block, origin) for rank, block in blocks.items()}
        self.last: dict[tuple[int, str, int], tuple[float, int]] = {}
        for rank, rank_step in self.ranks.items():
            for key, start in rank_step.starts.items():
                self.last[key] = max(self.last.get(key, (start, rank)), (start, rank))

    def losses(self) -> Iterator[Loss]:
        """Yield the losses of all ranks in the step: every wait, split by cause."""
        for rank, rank_step in self.ranks.items():
            for item in rank_step.idle:
                for cause, us in self._causes_of_wait(rank, item.span, item.begin, item.end, _MAX_DEPTH):
                    yield Loss(rank, self.step, item.span, cause, us)

    def _causes_of_wait(
        self, rank: int, span: Span, begin: float, end: float, depth: int
    ) -> Iterator[tuple[Cause, float]]:
        """Yield the causes, with microseconds, of the wait of ``rank`` in ``span`` from ``begin`` to ``end`` (see
        [Note: tracing a wait]).

        Times are in microseconds since the step's origin. ``depth``: how many more collectives may be traced.
        """
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
                yield from self._causes_in_rank(last, begin, until, depth)
            if end > max(begin, until):
                yield Cause("link", -1, SpanKind(span.kind).name.lower()), end - max(begin, until)

    def _causes_in_rank(self, rank: int, begin: float, end: float, depth: int) -> Iterator[tuple[Cause, float]]:
        """Yield the causes, with microseconds, for which ``rank`` kept others waiting from ``begin`` to ``end``.

        They are its own waits, each traced further while ``depth`` is not 0, and its computation.
        """
        rank_step = self.ranks[rank]
        for piece_begin, piece_end, span in rank_step.activities(begin, end):
            if span is not None and depth:
                yield from self._causes_of_wait(rank, span, piece_begin, piece_end, depth - 1)
            else:
                phase = rank_step.phase_at((piece_begin + piece_end) / 2)
                yield Cause("rank", rank, phase), piece_end - piece_begin
