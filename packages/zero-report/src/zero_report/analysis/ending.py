"""The end of a run that did not end well, or the phase of one that goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..record.reader import Attempt, Block, RankRecord, Run
from ..record.schema import COLLECTIVES, SpanKind

_FRESH = 5.0  # seconds since the last sign of a rank that lives; a record is written twice a second
_TOGETHER = 2.0  # seconds between the last signs of ranks that stopped at once
_LONG = 10.0  # a step that has lasted so many seconds, and so many times the usual, is said to hang
_PARTS = {
    SpanKind.DATA: "the data loader or the script",
    SpanKind.FORWARD: "forward",
    SpanKind.BACKWARD: "backward",
    SpanKind.UPDATE: "the update",
    SpanKind.SAVE: "a checkpoint",
}


@dataclass(frozen=True)
class End:
    """``text``: one line, empty where a run ended well; ``detail``: what else is known, line by line; ``badly``: it
    ended badly, or hangs."""

    text: str = ""
    detail: str = ""
    badly: bool = True


def how_it_ended(run: Run) -> End:
    """Return the first cause in one line, and what else is known."""
    attempt = run.last
    if run.failure is None:
        return how_attempt_ended(attempt, over=False)
    told, text = str(run.failure.get("detail", "")), str(run.failure.get("text", "the run failed"))
    hung = _hung(attempt, list(attempt.ranks.values())) if run.failure.get("interrupted") else ""
    if hung:
        told, text = "\n".join(filter(None, (text, told))), hung
    when = _detail(attempt)
    detail = "\n".join([told, *(["", "what ranks were in when they last wrote:", when] if when else [])])
    return End(text, detail.strip("\n"))


def how_attempt_ended(attempt: Attempt, *, over: bool = True) -> End:
    """Return how one start ended, as its own ranks tell; ``over``: it is known not to go on."""
    notes = [(note, rank) for rank, record in attempt.ranks.items() for note in record.notes]
    failures = sorted(
        (bool(note.get("follows")), float(note["at"]), rank, str(note.get("text", "")))
        for note, rank in notes
        if note["note"] == "failure"
    )
    failed = {rank for *_, rank, _ in failures}
    unfinished = [record for record in attempt.ranks.values() if not record.closed]
    silent = [record for record in unfinished if record.rank not in failed]
    if failures and not (failures[0][0] and silent):
        detail = "\n".join(f"rank {rank}: {text}" for *_, rank, text in failures)
        *_, rank, text = failures[0]
        return End(f"Rank {rank} failed first: {(text.splitlines() or [''])[0]}", detail)
    if silent and (failures or over):
        return _stopped(attempt, silent)
    return _unfinished(attempt, unfinished) if unfinished else End(badly=False)


def _unfinished(attempt: Attempt, unfinished: Sequence[RankRecord]) -> End:
    """Return what is known of ranks that did not end their records, and may go on."""
    if time.time() - min(record.last_written_at() for record in unfinished) >= _FRESH:
        return _stopped(attempt, unfinished)
    last = min(unfinished, key=lambda record: record.steps[-1:] or [0])
    block, usual = last.open_block(), _usual(last)
    if block is not None and _hangs(block, usual):
        lasts = f"has lasted {_lasted(block, usual)}"
        return End(f"Step {block.step} {lasts} and may hang{_reason(attempt)}.", _detail(attempt))
    return End(f"The run goes on; it is {_where(last)}.", _detail(attempt), badly=False)


def _stopped(attempt: Attempt, unfinished: Sequence[RankRecord]) -> End:
    """Return what is known of ranks that stopped writing."""
    signs = {record.rank: record.last_written_at() for record in unfinished}
    first = min(unfinished, key=lambda record: signs[record.rank])
    detail = _detail(attempt)
    together = max(signs.values()) - signs[first.rank] <= _TOGETHER
    if together and len(unfinished) == attempt.world_size > 1:
        if hung := _hung(attempt, unfinished):
            return End(hung, detail)
        who = "Both ranks" if attempt.world_size == 2 else f"All {attempt.world_size} ranks"
        return End(f"{who} stopped {_where(first)}: they were killed, or their machine was lost.", detail)
    also = "" if len(unfinished) == 1 else f"; {len(unfinished) - 1} more did later"
    text = f"Rank {first.rank} stopped{' first' if also else ''} {_where(first)}{also}"
    return End(f"{text}: it was killed, or its machine was lost.", detail)


def _hung(attempt: Attempt, ended: Sequence[RankRecord]) -> str:
    """Say that the last step hung before the run was ended; empty where it did not."""
    last = min(ended, key=lambda record: record.steps[-1:] or [0])
    block, usual = last.open_block(), _usual(last)
    if block is None or not _hangs(block, usual):
        return ""
    return f"Step {block.step} hung: it had lasted {_lasted(block, usual)} when the run was ended{_reason(attempt)}."


def _hangs(block: Block, usual: float) -> bool:
    return bool(usual) and block.us / 1e6 > _LONG * max(1.0, usual)


def _lasted(block: Block, usual: float) -> str:
    return f"{block.us / 1e6:.0f} s, {block.us / 1e6 / usual:,.0f} times the usual,"


def _reason(attempt: Attempt) -> str:
    """Name the one rank that is in no collective while others are; empty where there is not one such."""
    blocks = {rank: block for rank, record in attempt.ranks.items() if (block := record.open_block()) is not None}
    apart = [
        rank
        for rank, block in blocks.items()
        if not any(span.kind in COLLECTIVES for span in block.spans[len(block.spans) - block.under_way :])
    ]
    if len(apart) != 1 or len(blocks) < 2:
        return ""
    block = blocks[apart[0]]
    kinds = [SpanKind(span.kind) for span in block.spans[len(block.spans) - block.under_way :]]
    where = _PARTS.get(kinds[-1]) if kinds else None
    return "" if where is None else f"; rank {apart[0]} was in {where}, and others waited for it"


def _detail(attempt: Attempt) -> str:
    """Return what every rank was in when it last wrote, and what was warned of in that step."""
    found = dict.fromkeys(text for record in attempt.ranks.values() if (text := _present(record)))
    for record in attempt.ranks.values():
        block = record.open_block()
        step = None if block is None else block.step
        found.update({str(n.get("text")): None for n in record.notes if n["note"] == "warning" and n["step"] == step})
    return "\n".join(found)


def _present(record: RankRecord) -> str:
    """Return the call a rank was in when it last wrote, in one line; empty where it ended."""
    block = record.open_block()
    if record.closed or block is None or not block.under_way:
        return ""
    now = block.spans[-block.under_way :]
    messages = [span for span in now if span.kind in COLLECTIVES]
    parts = [span for span in now if span.kind not in COLLECTIVES]
    inside = [f"in {_PARTS.get(SpanKind(span.kind), 'no pass')} for {span.duration / 1e6:.1f} s" for span in parts[-1:]]
    inside += [
        f"{SpanKind(span.kind).name.lower()} of {span.name} under way for {span.duration / 1e6:.1f} s"
        for span in messages[:3]
    ]
    return f"rank {record.rank}, step {block.step}: {', '.join(inside)}"


def _usual(record: RankRecord) -> float:
    """Seconds of a usual step."""
    table = record.table
    return float(np.median(table["seconds"] / table["steps"])) if len(table["first"]) else 0.0


def _where(record: RankRecord) -> str:
    """The step that a rank was in when it last wrote."""
    block = record.open_block()
    if block is not None:
        return f"in step {block.step}"
    table = record.table
    if not len(table["first"]):
        return "before a step was over"
    return f"after step {table['first'][-1] + table['steps'][-1] - 1:.0f}"
