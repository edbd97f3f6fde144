"""How a run ended, when it did not end well; or what it is in, when it goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..record.reader import Attempt, RankRecord, Run
from ..record.schema import COLLECTIVES, Kind

_FRESH = 5.0  # seconds since the last sign of a rank that lives; a record is written twice a second
_TOGETHER = 2.0  # seconds between the last signs of ranks that stopped at once
_LONG = 10.0  # a step that has lasted so many seconds, and so many times the usual, is said to hang
_PARTS = {
    Kind.DATA: "the data loader or the script",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.UPDATE: "the update",
    Kind.SAVE: "a checkpoint",
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
    if run.failure is not None:
        told = str(run.failure.get("detail", ""))
        when = [text for record in attempt.ranks.values() if (text := _present(record))]
        detail = "\n".join([told, *(["", "what ranks were in when they last wrote:", *when] if when else [])])
        return End(str(run.failure.get("text", "the run failed")), detail)
    notes = [(note, rank) for rank, record in attempt.ranks.items() for note in record.notes]
    failures = sorted(
        (float(note["at"]), rank, str(note.get("text", ""))) for note, rank in notes if note["note"] == "failure"
    )
    if failures:
        detail = "\n".join(f"rank {rank}: {text}" for _, rank, text in failures)
        return End(f"Rank {failures[0][1]} failed first: {(failures[0][2].splitlines() or [''])[0]}", detail)
    unfinished = [record for record in attempt.ranks.values() if not record.closed]
    return _unfinished(attempt, unfinished) if unfinished else End(badly=False)


def _unfinished(attempt: Attempt, unfinished: Sequence[RankRecord]) -> End:
    """What is known of ranks that did not end their records."""
    signs = {record.rank: record.last_sign() for record in unfinished}
    first = min(unfinished, key=lambda record: signs[record.rank])
    detail = "\n".join(text for record in attempt.ranks.values() if (text := _present(record)))
    if time.time() - signs[first.rank] < _FRESH:
        last = min(unfinished, key=lambda record: record.steps[-1:] or [0])
        block, usual = last.open_block(), _usual(last)
        if block is not None and usual and block.us / 1e6 > _LONG * max(1.0, usual):
            lasts = f"has lasted {block.us / 1e6:.0f} s, {block.us / 1e6 / usual:,.0f} times the usual"
            return End(f"Step {block.step} {lasts}: the run may hang.", detail)
        return End(f"The run goes on; it is {_where(last)}.", detail, badly=False)
    together = max(signs.values()) - signs[first.rank] <= _TOGETHER
    if together and len(unfinished) == attempt.world_size > 1:
        who = "Both ranks" if attempt.world_size == 2 else f"All {attempt.world_size} ranks"
        return End(f"{who} stopped {_where(first)}: they were killed, or their machine was lost.", detail)
    also = "" if len(unfinished) == 1 else f"; {len(unfinished) - 1} more did later"
    text = f"Rank {first.rank} stopped{' first' if also else ''} {_where(first)}{also}"
    return End(f"{text}: it was killed, or its machine was lost.", detail)


def _present(record: RankRecord) -> str:
    """Return the call a rank was in when it last wrote, in one line; empty where it ended."""
    block = record.open_block()
    if record.closed or block is None or not block.under_way:
        return ""
    now = block.spans[-block.under_way :]
    messages = [span for span in now if span.kind in COLLECTIVES]
    parts = [span for span in now if span.kind not in COLLECTIVES]
    inside = [f"in {_PARTS.get(Kind(span.kind), 'no pass')} for {span.duration / 1e6:.1f} s" for span in parts[-1:]]
    inside += [
        f"{Kind(span.kind).name.lower()} of {span.name} under way for {span.duration / 1e6:.1f} s"
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
