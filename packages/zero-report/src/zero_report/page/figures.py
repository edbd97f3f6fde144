"""The tables of the page: totals, ranks, causes, waits, links, checkpoints, events, units, configuration.

A row is a dict or list for one row of a table. A cause is what a rank waited for, a link a kind of transfer (between
ranks, to the host, to drives); both are from the analysis. The first rank of an attempt is `Attempt.first`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..analysis.analyse import Analysis
from ..analysis.causes import Share, cause_text
from ..analysis.ending import describe_attempt_end
from ..record.parsing import Array
from ..record.reader import Attempt, RankRecord, Run
from ..record.schema import OWNERS, SpanKind
from .curves import WAITS, tables

_CAUSES = 8
_EVENTS = 400
_UNITS = 400
_OWN_NOTES = ("head", "closed", "checkpoint", "plan", "peak")


def totals(run: Run) -> dict[str, Any]:
    """Return totals and peaks of the whole run, over all attempts without repeated steps, by name.

    ``steps``, ``seconds``, ``samples`` and ``skipped`` are the first rank's; ``rank_seconds``, ``compute``, phases,
    waits and bytes are sums over ranks; memory is the highest of any rank. ``compute``: seconds of passes and updates
    without waits. ``phases``, ``waits`` and ``memory`` are dicts, of seconds or bytes by name; ``loss`` is the ranks'
    mean of the last one, None if there is none. Rates are per second, 0 without time.
    """
    found = [table for _, table in tables(run)]

    def total(name: str) -> float:
        """Return the sum of a column over all tables, without NaN."""
        return float(sum(np.nansum(table[name]) for table in found))

    def peak(name: str) -> float:
        """Return the largest value of a column over all tables, without NaN; 0 if there is none."""
        return float(max((np.nanmax(t[name], initial=0.0) for t in found), default=0.0))

    lead = [table for record, table in tables(run) if record.rank == run.last.first.rank]
    steps = float(sum(table["steps"].sum() for table in lead))
    seconds = float(sum(np.nansum(table["seconds"]) for table in lead))
    rank_seconds = total("seconds") or 1.0
    waits = {name.removesuffix("_s"): total(name) for name in WAITS}
    phases = {name: total(f"{name}_s") for name in ("data", "forward", "backward", "update", "save")}
    samples = float(sum(np.nansum(table["samples"]) for table in lead))
    tokens = float(sum(np.nansum(t["tokens"]) / record.head.get("world_size", 1) for record, t in tables(run)))
    return {
        "steps": steps,
        "seconds": seconds,
        "step_seconds": seconds / steps if steps else 0.0,
        "samples": samples,
        "samples_per_second": samples / seconds if seconds else 0.0,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "loss": _last_loss(run.last),
        "skipped": float(sum(np.nansum(table["skipped"]) for table in lead)),
        "replayed": run.replayed,
        "rank_seconds": rank_seconds,
        "phases": phases,
        "waits": waits,
        "compute": max(0.0, sum(phases[p] for p in ("forward", "backward", "update")) - sum(waits.values())),
        **{name: total(name) for name in ("sent_bytes", "across_bytes", "collectives", "read_bytes", "written_bytes")},
        "process_bytes": peak("process_bytes"),
        "device_bytes": peak("device_bytes"),
        "memory": {owner: peak(f"{owner}_bytes") for owner in OWNERS},
    }


def _last_loss(attempt: Attempt) -> float | None:
    """Return the mean over ranks of each rank's newest loss; None if no rank has one."""
    known = [losses[~np.isnan(losses)] for record in attempt.ranks.values() for losses in [record.table["loss"]]]
    newest = [float(losses[-1]) for losses in known if len(losses)]
    return sum(newest) / len(newest) if newest else None


def rank_rows(attempt: Attempt, analysis: Analysis) -> dict[str, Any]:
    """Return the columns of the table of the attempt's ranks, by name, one value per rank in the order of ``rank``.

    They are seconds per step by phase and wait, peak memory in bytes, host, ``closed``, and ``blamed``, the share of
    the step that ranks lost because of this one (its own losses too if there are several ranks).
    """
    ranks = sorted(attempt.ranks)
    blamed = dict.fromkeys(ranks, 0.0)
    for share in analysis.causes.by_rank:
        if share.rank in blamed and (share.loser != share.rank or len(ranks) > 1):
            blamed[share.rank] += share.share
    columns: dict[str, list[float]] = {name: [] for name in ("data", "compute", "wait", "tier", "save", "memory")}
    for rank in ranks:
        table = attempt.ranks[rank].table
        steps = float(table["steps"].sum()) or 1.0
        seconds = {
            name: _column_sum(table, f"{name}_s") / steps for name in ("data", "forward", "backward", "update", "save")
        }
        tier = _column_sum(table, "tier_wait_s") / steps
        wait = sum(_column_sum(table, name) for name in WAITS) / steps - tier
        columns["data"].append(seconds["data"])
        columns["save"].append(seconds["save"])
        columns["tier"].append(tier)
        columns["wait"].append(wait)
        columns["compute"].append(max(0.0, sum(seconds[p] for p in ("forward", "backward", "update")) - wait - tier))
        columns["memory"].append(float(np.nanmax(table["process_bytes"], initial=0.0)))
    hosts = [str(attempt.ranks[rank].head.get("host", "")) for rank in ranks]
    ended = [attempt.ranks[rank].closed for rank in ranks]
    return {"rank": ranks, "host": hosts, "closed": ended, "blamed": [blamed[rank] for rank in ranks], **columns}


def cause_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return one row per kind of cause, the largest first: its share of the step, its seconds, and texts about the
    ranks (at most three) that caused most of it."""
    rows = []
    for share in analysis.causes.by_kind[:_CAUSES]:
        rows.append(
            {"kind": share.kind, "share": share.share, "seconds": share.seconds, "most": _main_ranks(share, analysis)}
        )
    return rows


def _main_ranks(share: Share, analysis: Analysis) -> list[str]:
    """Return texts about the ranks, at most three, that caused most seconds of the kind of ``share``, the most first,
    such as "rank 3, forward: 12.5 %".

    A text has what was waited for longest, and the largest share of its time that any rank lost by it.
    """
    found = []
    for own in sorted(analysis.causes.of_kind(share.kind), key=lambda own: -own.seconds)[:3]:
        thing = max(own.names, key=lambda name: own.names[name])
        who = f"rank {own.rank}" if own.rank >= 0 else ""
        found.append(", ".join(part for part in (who, thing) if part) + f": {100 * own.share:.1f} %")
    return found


def wait_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return one row per wait, the longest ten first: rank, step, microseconds, the span it waited in and the cause, as
    text."""
    return [
        {
            "rank": loss.rank,
            "step": loss.step,
            "us": loss.us,
            "in": f"{SpanKind(loss.span.kind).name.lower().replace('_', ' ')} of {loss.span.name}"
            if loss.span.kind not in (SpanKind.DATA, SpanKind.SAVE)
            else SpanKind(loss.span.kind).name.lower(),
            "cause": cause_text(loss.cause),
        }
        for loss in analysis.causes.longest
    ]


def link_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return one row per link, the busiest first: bytes, seconds busy and waited, rate and peak in bytes per second of
    one rank."""
    return [
        {
            "name": link.full_name,
            "bytes": link.nbytes,
            "busy": link.busy,
            "waited": link.waited,
            "rate": link.rate,
            "peak": link.peak,
            "source": link.source,
        }
        for link in analysis.links
    ]


def checkpoint_rows(run: Run) -> list[dict[str, Any]]:
    """Return one row per checkpoint and attempt: step, path, Unix seconds, bytes of all ranks, and the longest time of
    any rank.

    ``seconds`` is until it was on disk, ``blocked_s`` how long training was blocked.
    """
    rows: dict[tuple[int, int, str], dict[str, Any]] = {}
    for number, _, note in _all_notes(run):
        if note["note"] == "checkpoint":
            key = (number, int(note.get("of_step", note.get("step", 0))), str(note.get("path", "")))
            row = rows.setdefault(
                key, {"step": key[1], "path": key[2], "at": note["at"], "bytes": 0, "seconds": 0.0, "blocked_s": 0.0}
            )
            row["bytes"] += int(note.get("bytes") or 0)
            for name in ("seconds", "blocked_s"):
                row[name] = max(row[name], float(note.get(name) or 0.0))
    return list(rows.values())


def event_rows(run: Run) -> list[dict[str, Any]]:
    """Return the last 400 events of the run (warnings, failures, restarts), by time, as dicts for the page.

    ``kind``, ``step``, ``at`` (Unix seconds), ``text`` and ``ranks``; the same event of several ranks of one attempt is
    one row.
    Checkpoints, plans and peaks are left out.
    """
    rows: dict[tuple[int, str, int, str], dict[str, Any]] = {}
    for attempt, record, note in _all_notes(run):
        if note["note"] in _OWN_NOTES:
            continue
        facts = {key: value for key, value in note.items() if key not in ("note", "at", "step", "text")}
        text = str(note.get("text") or "") or ", ".join(f"{key} {value}" for key, value in facts.items())
        row = rows.setdefault(
            (attempt, note["note"], int(note.get("step", 0)), text),
            {"kind": note["note"], "step": note.get("step", 0), "at": note["at"], "text": text, "ranks": []},
        )
        if record.rank not in row["ranks"]:
            row["ranks"].append(record.rank)
    return sorted([*rows.values(), *_restart_rows(run)], key=lambda row: float(row["at"]))[-_EVENTS:]


def _restart_rows(run: Run) -> list[dict[str, Any]]:
    """Return two rows, in the form of `event_rows`, for each restart of the run: how the attempt before it ended, and
    at which step the new one resumed.

    The second is absent for an attempt that recorded no step.
    """
    rows = []
    for before, attempt in pairwise(run.attempts):
        first, began = attempt.first.table["first"], attempt.first.table["began"]
        how = describe_attempt_end(before).text
        text = f"start {before.number + 1}: {how}" if how else f"start {before.number + 1} ended"
        last = max(record.last_written_at() for record in before.ranks.values())
        rows.append({"kind": "end", "step": _last_step(before), "at": last, "text": text, "ranks": []})
        if len(first):
            again = max(0, _last_step(before) - int(first[0]) + 1)
            repeats = f"; {again} {'step is' if again == 1 else 'steps are'} done again" if again else ""
            ranks = f"{attempt.world_size} {'rank' if attempt.world_size == 1 else 'ranks'}"
            text = f"start {attempt.number + 1} continues at step {first[0]:.0f} with {ranks}{repeats}"
            rows.append({"kind": "start", "step": int(first[0]), "at": float(began[0]), "text": text, "ranks": []})
    return rows


def _last_step(attempt: Attempt) -> int:
    """Return the last step in the table of the attempt's first rank; 0 if it has none."""
    table = attempt.first.table
    return int(table["first"][-1] + table["steps"][-1] - 1) if len(table["first"]) else 0


def flight_rows(run: Run) -> list[dict[str, Any]]:
    """Return one row per rank with its last collectives, from the launcher's report of a failure; an empty list without
    a report.

    ``waits``: the collective in which the rank waited, or None; ``last``: its last collectives, as lines of text.
    """
    found = run.failure.get("flight") if run.failure is not None else None
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    return [
        {"rank": row.get("rank"), "waits": row.get("waits"), "last": [str(line) for line in row.get("last") or []]}
        for row in rows
    ]


def unit_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return one row per unit, parameter or message, the most waited for first, at most 400 rows.

    Seconds, bytes and messages are means per rank and analysed step; ``cause`` is the main cause of the waits for it,
    as text.
    """
    scale = len(analysis.causes.steps) * analysis.causes.ranks or 1
    rows = sorted(analysis.units, key=lambda unit: -(unit.waited + 1e-6 * unit.computed))[:_UNITS]
    return [
        {
            "name": unit.name,
            "computed": unit.computed / scale,
            "gathered": unit.gathered / scale,
            "reduced": unit.reduced / scale,
            "other": unit.other / scale,
            "read": unit.read / scale,
            "written": unit.written / scale,
            "messages": unit.messages / scale,
            "waited": unit.waited / scale,
            "cause": _main_cause(analysis.causes.by_name.get(unit.name, {})),
        }
        for unit in rows
    ]


def _main_cause(seconds: dict[str, float]) -> str:
    """Return as text the cause by which a unit's waits lost most time, and its share of that time; empty without waits.

    ``seconds``: the time lost, by cause in words.
    """
    if not seconds:
        return ""
    cause = max(seconds, key=lambda name: seconds[name])
    return f"{100 * seconds[cause] / sum(seconds.values()):.0f} %: {cause}"


def configuration_rows(attempt: Attempt) -> list[list[Any]]:
    """Return [path, value, provenance, note] of every setting of an attempt, as the run's writer gave them in its
    facts; what it did not give is empty."""
    rows = attempt.facts.get("configuration", [])
    return [[*map(_plain_value, row), "", "", "", ""][:4] for row in rows if isinstance(row, list)]


def plan_bytes(run: Run) -> float | None:
    """Return the planned peak of one rank's device, in bytes, of the newest plan; None if the run had no plan."""
    found = [note.get("bytes") for _, _, note in _all_notes(run) if note["note"] == "plan"]
    return float(found[-1]) if found and found[-1] is not None else None


def _all_notes(run: Run) -> list[tuple[int, RankRecord, dict[str, Any]]]:
    """Return (number of the attempt, record of the rank, note) of every note of the run."""
    return [(a.number, record, note) for a in run.attempts for record in a.ranks.values() for note in record.notes]


def _column_sum(table: dict[str, Array], name: str) -> float:
    """Return the sum of the values in the column `name` of a table, without NaN."""
    return float(np.nansum(table[name]))


def _plain_value(value: Any) -> Any:
    """Return ``value`` if JSON has its type and it is no collection, else its text."""
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
