"""Lost time by cause: the share of the step that each cause took, and the longest single waits.

A cause and a loss are those of `waiting.py`: a loss is time that a rank waited, its cause what it waited for.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..record.parsing import Block
from ..record.reader import Attempt
from .units import subject_of
from .waiting import Cause, CauseKind, Loss, losses

_MAX_SPANS = 300_000  # that the analysis reads, about
_LONGEST = 10
_WARM_UP_STEPS = 2
_Key = tuple[CauseKind, int]


@dataclass
class Share:
    """The time that was lost by the causes of one kind on one rank, or on all ranks.

    ``rank``: the rank that caused it; -1 for all ranks and for links. ``loser``: the rank that lost the largest share
    of its time by it; ``share``: that share, 0 to 1. ``seconds``: lost by all ranks together. ``names``: seconds by
    what was waited for: the unit of a link's message, the span of a tier, the phase of a rank.
    """

    kind: CauseKind
    rank: int
    share: float
    loser: int
    seconds: float
    names: dict[str, float] = field(default_factory=dict)


@dataclass
class Causes:
    """The time lost in ``steps``, by cause.

    ``ranks``: their number. ``seconds``: of all steps and ranks together, lost or not. ``by_kind``, ``by_rank``: the
    largest share first. ``longest``: the longest single waits. ``by_name``: seconds lost by the unit, parameter or
    message that was waited for, and then by the cause in words.
    """

    steps: list[int]
    ranks: int
    seconds: float
    by_kind: list[Share]
    by_rank: list[Share]
    longest: list[Loss]
    by_name: dict[str, dict[str, float]]

    def of_kind(self, kind: CauseKind) -> list[Share]:
        """Return the shares of one kind, one per rank that caused some; empty if no time was lost by it.

        The first has the largest ``share`` of one rank's time, which need not be most ``seconds`` of all ranks.
        """
        return [share for share in self.by_rank if share.kind == kind]


def chosen_steps(attempt: Attempt, most: int = 64) -> list[int]:
    """Return the steps to analyse: at most ``most``, evenly spread over the ended steps whose spans all ranks kept.

    Fewer if their spans would be more than about 300,000. Steps 1 and 2 are warm-up; they are chosen only if there are
    no others. Empty if no step has ended.
    """
    steps = attempt.steps()
    if steps and any(record.is_open(steps[-1]) for record in attempt.ranks.values()):
        steps.pop()
    if not steps:
        return []
    sample = attempt.traced.block(steps[-1])
    spans = max(1, len(sample.spans) if sample is not None else 1)
    count = max(2, min(most, _MAX_SPANS // (spans * len(attempt.ranks))))
    late = [step for step in steps if step > _WARM_UP_STEPS] or steps
    if len(late) <= count:
        return late
    return sorted({late[round(number * (len(late) - 1) / (count - 1))] for number in range(count)})


class CauseSums:
    """Adds up the time that ranks lost by each cause, step by step: call `add` for every step, then `result`."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._total: dict[int, float] = defaultdict(float)
        self._lost: dict[_Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._names: dict[_Key, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._by_name: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._longest: list[tuple[float, int, Loss]] = []
        self._losses_added = 0

    def add(self, step: int, blocks: Mapping[int, Block]) -> None:
        """Add the losses of step number ``step``; ``blocks``: the step's spans by rank, without ranks that did not keep
        them.
        """
        self._steps.append(step)
        for rank, block in blocks.items():
            self._total[rank] += block.us / 1e6
        for loss in losses(step, blocks):
            key = (loss.cause.kind, loss.cause.rank)
            self._lost[key][loss.rank] += loss.us / 1e6
            self._names[key][_waited_for(loss)] += loss.us / 1e6
            self._by_name[subject_of(loss.span)][cause_text(loss.cause)] += loss.us / 1e6
            self._losses_added += 1
            if len(self._longest) < _LONGEST:
                heapq.heappush(self._longest, (loss.us, -self._losses_added, loss))
            elif loss.us > self._longest[0][0]:
                heapq.heapreplace(self._longest, (loss.us, -self._losses_added, loss))

    def result(self) -> Causes:
        """Return the time lost in all steps added so far, by cause, the largest first."""
        by_rank = [_share(*key, by, self._total, self._names[key]) for key, by in self._lost.items()]
        return Causes(
            self._steps,
            len(self._total),
            sum(self._total.values()),
            _largest_first(_shares_by_kind(self._lost, self._total, self._names)),
            _largest_first(by_rank),
            [loss for *_, loss in sorted(self._longest, key=lambda item: -item[0])],
            {name: dict(by) for name, by in self._by_name.items()},
        )


def _shares_by_kind(
    lost: dict[_Key, dict[int, float]], total: dict[int, float], names: dict[_Key, dict[str, float]]
) -> list[Share]:
    """Return one share per kind of cause, over all ranks that caused it.

    ``lost``, ``names``: for each (kind, causing rank) the seconds by losing rank, and by what was waited for.
    ``total``: seconds of the steps, by rank.
    """
    merged: dict[CauseKind, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    merged_names: dict[CauseKind, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (kind, rank), by in lost.items():
        for loser, seconds in by.items():
            merged[kind][loser] += seconds
        for name, seconds in names[(kind, rank)].items():
            merged_names[kind][name] += seconds
    return [_share(kind, -1, by, total, merged_names[kind]) for kind, by in merged.items()]


def _share(kind: CauseKind, rank: int, by: dict[int, float], total: dict[int, float], names: dict[str, float]) -> Share:
    """Return the share of one kind of cause by one rank, or -1 for all.

    ``by``: seconds lost by each rank, ``total``: seconds of the steps by rank, ``names``: seconds by what was waited
    for.
    """
    loser = max(by, key=lambda r: by[r] / (total[r] or 1))
    return Share(kind, rank, by[loser] / (total[loser] or 1), loser, sum(by.values()), dict(names))


def _waited_for(loss: Loss) -> str:
    """Return the name under which a loss is counted: for a link the unit whose message was waited for, else the name of
    the loss's cause."""
    return loss.span.name if loss.cause.kind == "link" else loss.cause.name


def _largest_first(shares: Sequence[Share]) -> list[Share]:
    """Return the shares sorted by their ``share`` of the step, the largest first."""
    return sorted(shares, key=lambda share: -share.share)


def cause_text(cause: Cause) -> str:
    """Return a cause in words, such as "the data loader of rank 3"."""
    if cause.kind == "data":
        return f"the data loader of rank {cause.rank}"
    if cause.kind == "tier":
        return f"{cause.name} on rank {cause.rank}"
    if cause.kind == "save":
        return f"a checkpoint on rank {cause.rank}"
    if cause.kind == "link":
        return f"the link: {cause.name} under way"
    return f"rank {cause.rank}, busy in {cause.name}" if cause.name != "between passes" else f"rank {cause.rank}, busy"
