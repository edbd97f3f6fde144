"""How a run ended: which rank failed, stopped or hung first; or that the run continues.

Ranks are judged by their records: a rank that closed its record has ended, one that has not written for some seconds
has stopped. A block has the spans of a rank's step; those under way had begun and not ended when the rank last wrote.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..record.parsing import Block
from ..record.reader import Attempt, RankRecord, Run
from ..record.schema import COLLECTIVES, SpanKind

_ALIVE_SECONDS = 5.0  # a rank that last wrote less than this ago is alive; a record is written twice a second
_TOGETHER_SECONDS = 2.0  # between the last writes of ranks that stopped at the same time
_HANG_FACTOR = 10.0  # a step hangs after this many seconds and this many times the median step
_PHASE_NAMES = {
    SpanKind.DATA: "the data loader or the script",
    SpanKind.FORWARD: "forward",
    SpanKind.BACKWARD: "backward",
    SpanKind.UPDATE: "the update",
    SpanKind.SAVE: "a checkpoint",
}


@dataclass(frozen=True)
class End:
    """How a run or an attempt ended.

    ``text``: one line, empty if it ended well. ``detail``: more lines, such as the last calls of the ranks. ``badly``:
    it failed, was killed, or hangs.
    """

    text: str = ""
    detail: str = ""
    badly: bool = True


def describe_end(run: Run) -> End:
    """Return how the run's last attempt ended, or that it continues.

    The launcher's report counts if there is one, else the ranks' records, and the time since they last wrote.
    """
    attempt = run.last
    if run.failure is None:
        return describe_attempt_end(attempt, over=False)
    told, text = str(run.failure.get("detail", "")), str(run.failure.get("text", "the run failed"))
    hung = _hang_sentence(attempt, list(attempt.ranks.values())) if run.failure.get("interrupted") else ""
    if hung:
        told, text = "\n".join(filter(None, (text, told))), hung
    when = _last_calls(attempt)
    detail = "\n".join([told, *(["", "what ranks were in when they last wrote:", when] if when else [])])
    return End(text, detail.strip("\n"))


def describe_attempt_end(attempt: Attempt, *, over: bool = True) -> End:
    """Return how one attempt ended, from its ranks' records alone.

    ``over``: it certainly has ended; otherwise ranks that wrote a few seconds ago count as alive.
    """
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
        return _describe_stopped(attempt, silent)
    return _describe_unfinished(attempt, unfinished) if unfinished else End(badly=False)


def _describe_unfinished(attempt: Attempt, unfinished: Sequence[RankRecord]) -> End:
    """Return the end of an attempt that is perhaps not over, for the ranks that have not closed their records: stopped
    if one of them has not written for 5 s, else hanging or continuing."""
    if time.time() - min(record.last_written_at() for record in unfinished) >= _ALIVE_SECONDS:
        return _describe_stopped(attempt, unfinished)
    last = min(unfinished, key=lambda record: record.steps[-1:] or [0])
    block, usual = last.open_block(), _median_step_seconds(last)
    if block is not None and _is_hanging(block, usual):
        lasts = f"has lasted {_duration_text(block, usual)}"
        return End(f"Step {block.step} {lasts} and may hang{_waited_for_clause(attempt)}.", _last_calls(attempt))
    return End(f"The run continues; it is {_last_place(last)}.", _last_calls(attempt), badly=False)


def _describe_stopped(attempt: Attempt, unfinished: Sequence[RankRecord]) -> End:
    """Return the end of an attempt whose ranks ``unfinished``, at least one, stopped writing without closing their
    records: hung, killed or lost.

    The rank that wrote least recently is named, unless all stopped together.
    """
    signs = {record.rank: record.last_written_at() for record in unfinished}
    first = min(unfinished, key=lambda record: signs[record.rank])
    detail = _last_calls(attempt)
    together = max(signs.values()) - signs[first.rank] <= _TOGETHER_SECONDS
    if together and len(unfinished) == attempt.world_size > 1:
        if hung := _hang_sentence(attempt, unfinished):
            return End(hung, detail)
        who = "Both ranks" if attempt.world_size == 2 else f"All {attempt.world_size} ranks"
        return End(f"{who} stopped {_last_place(first)}: they were killed, or their machine was lost.", detail)
    also = "" if len(unfinished) == 1 else f"; {len(unfinished) - 1} more did later"
    text = f"Rank {first.rank} stopped{' first' if also else ''} {_last_place(first)}{also}"
    return End(f"{text}: it was killed, or its machine was lost.", detail)


def _hang_sentence(attempt: Attempt, ended: Sequence[RankRecord]) -> str:
    """Return a sentence that says that the last step hung before the run was ended; empty if it did not hang.

    ``ended``: the ranks to examine, of which the one that got least far counts.
    """
    last = min(ended, key=lambda record: record.steps[-1:] or [0])
    block, usual = last.open_block(), _median_step_seconds(last)
    if block is None or not _is_hanging(block, usual):
        return ""
    lasted, waited_for = _duration_text(block, usual), _waited_for_clause(attempt)
    return f"Step {block.step} hung: it had lasted {lasted} when the run was ended{waited_for}."


def _is_hanging(block: Block, usual: float) -> bool:
    """Return whether a step has lasted more than ten times ``usual``, and more than 10 s, and so hangs.

    ``usual``: seconds of a median step; 0 if it is not known, and then no step hangs.
    """
    return bool(usual) and block.us / 1e6 > _HANG_FACTOR * max(1.0, usual)


def _duration_text(block: Block, usual: float) -> str:
    """Return how long a step lasted as text, in seconds and as a multiple of ``usual``, the seconds of a median
    step."""
    return f"{block.us / 1e6:.0f} s, {block.us / 1e6 / usual:,.0f} times the usual,"


def _waited_for_clause(attempt: Attempt) -> str:
    """Return a clause that names the one rank that is in no collective while all others are in one; empty unless there
    is exactly one such rank.
    """
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
    where = _PHASE_NAMES.get(kinds[-1]) if kinds else None
    return "" if where is None else f"; rank {apart[0]} was in {where}, and others waited for it"


def _last_calls(attempt: Attempt) -> str:
    """Return lines that say in which phase and collectives each rank was when it last wrote, with the warnings of that
    step; empty if there is nothing to say."""
    found = dict.fromkeys(text for record in attempt.ranks.values() if (text := _last_call(record)))
    for record in attempt.ranks.values():
        block = record.open_block()
        step = None if block is None else block.step
        found.update({str(n.get("text")): None for n in record.notes if n["note"] == "warning" and n["step"] == step})
    return "\n".join(found)


def _last_call(record: RankRecord) -> str:
    """Return a line that says in which phase and collectives a rank was when it last wrote; empty if it closed its
    record or no span was under way."""
    block = record.open_block()
    if record.closed or block is None or not block.under_way:
        return ""
    now = block.spans[-block.under_way :]
    messages = [span for span in now if span.kind in COLLECTIVES]
    parts = [span for span in now if span.kind not in COLLECTIVES]
    inside = [
        f"in {_PHASE_NAMES.get(SpanKind(span.kind), 'no pass')} for {span.duration / 1e6:.1f} s" for span in parts[-1:]
    ]
    inside += [
        f"{SpanKind(span.kind).name.lower()} of {span.name} under way for {span.duration / 1e6:.1f} s"
        for span in messages[:3]
    ]
    return f"rank {record.rank}, step {block.step}: {', '.join(inside)}"


def _median_step_seconds(record: RankRecord) -> float:
    """Return the median over the table's rows of their seconds per step; 0 if there are none."""
    table = record.table
    return float(np.median(table["seconds"] / table["steps"])) if len(table["first"]) else 0.0


def _last_place(record: RankRecord) -> str:
    """Return where a rank was when it last wrote: "in step 3", "after step 2" or "before a step was over"."""
    block = record.open_block()
    if block is not None:
        return f"in step {block.step}"
    table = record.table
    if not len(table["first"]):
        return "before a step was over"
    return f"after step {table['first'][-1] + table['steps'][-1] - 1:.0f}"
