"""Curves over all steps: loss, rates, throughput, seconds by phase and wait, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..record.parsing import Array
from ..record.reader import RankRecord, Run
from ..record.schema import OWNERS

_POINTS = 1200
_BAND = 8  # with at least this many ranks, a band leaves out the lowest and the highest 5 %
WAITS = ("gather_wait_s", "reduce_wait_s", "control_wait_s", "tier_wait_s")
_REPORTED = ("lr", "grad_norm", "loss_scale", "began")
_SECONDS = ("seconds", "data_s", "forward_s", "backward_s", "update_s", "save_s", *WAITS)
_COUNTS = ("samples", "skipped")


def tables(run: Run) -> Iterator[tuple[RankRecord, dict[str, Array]]]:
    """Yield (record, table) of every rank of every attempt, without rows of steps that a later attempt repeated.

    The record's own table stays as it is.
    """
    firsts = [a.first.table["first"] for a in run.attempts]
    begins = [float(first[0]) if len(first) else np.inf for first in firsts]
    for number, attempt in enumerate(run.attempts):
        until = min(begins[number + 1 :], default=np.inf)
        for record in attempt.ranks.values():
            keep = record.table["first"] < until
            yield record, {name: column[keep] for name, column in record.table.items()}


def curves(run: Run) -> dict[str, Any]:
    """Return the curves by name, with one number per point; a point covers ``per_point`` steps. At most about 1,200
    points.

    Loss and process memory are means over ranks, with a band (``_low``, ``_high``); seconds, tokens and memory by owner
    are means over ranks; learning rate, gradient norm, loss scale, samples and skipped steps are the first rank's.
    Seconds, samples, tokens and skipped steps are per step; memory is in bytes. A point without data is NaN. Only an
    empty ``step`` if no step is in the tables.
    """
    found = [(record, table) for record, table in tables(run) if len(table["first"])]
    if not found:
        return {"step": []}
    low = min(float(table["first"][0]) for _, table in found)
    high = max(float(table["first"][-1] + table["steps"][-1]) for _, table in found)
    widest = max(float(table["steps"].max()) for _, table in found)
    width = max(widest, np.ceil((high - low) / _POINTS))
    points = int(np.ceil((high - low) / width))
    bins = _Bins(low, width, points)
    mean: dict[str, Array] = {}
    for name in _REPORTED:
        mean[name] = bins.mean([(table, table[name]) for record, table in found if record.rank == _first_rank(run)])
    for name in _SECONDS:
        mean[name] = bins.mean([(table, table[name] / table["steps"]) for _, table in found])
    for name in _COUNTS:
        lead = [(t, t[name] / t["steps"]) for record, t in found if record.rank == _first_rank(run)]
        mean[name] = bins.mean(lead)
    mean["tokens"] = bins.mean([(table, table["tokens"] / table["steps"]) for _, table in found])
    losses = bins.by_rank([(record.rank, table, table["loss"]) for record, table in found])
    process = bins.by_rank([(record.rank, table, table["process_bytes"]) for record, table in found])
    out: dict[str, Any] = dict(mean)
    out["step"] = low + width * np.arange(points)
    out["loss"], out["loss_low"], out["loss_high"] = _band(losses)
    out["process"], out["process_low"], out["process_high"] = _band(process)
    out["memory"] = {owner: bins.mean([(table, table[f"{owner}_bytes"]) for _, table in found]) for owner in OWNERS}
    out["per_point"] = width
    return out


class _Bins:
    """The points of the curves: ``count`` bins of ``width`` consecutive steps each, from step ``low`` on."""

    def __init__(self, low: float, width: float, count: int) -> None:
        self._low, self._width, self._count = low, width, count

    def mean(self, columns: list[tuple[dict[str, Array], Array]]) -> Array:
        """Return the mean in each bin of the values of all tables, weighted by the steps of their rows; NaN for an
        empty bin.

        ``columns``: pairs of a table and one value per row of it; NaN is left out.
        """
        total, weight = np.zeros(self._count), np.zeros(self._count)
        for table, values in columns:
            known = ~np.isnan(values)
            at = ((table["first"][known] + (table["steps"][known] - 1) / 2 - self._low) / self._width).astype(int)
            at = np.clip(at, 0, self._count - 1)
            total += np.bincount(at, values[known] * table["steps"][known], self._count)
            weight += np.bincount(at, table["steps"][known], self._count)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(total / weight)

    def by_rank(self, columns: list[tuple[int, dict[str, Array], Array]]) -> Array:
        """Return the mean in each bin of each rank's values: one row per rank, in the order in which ranks first
        appear, one column per bin.

        ``columns``: (rank, table, values), with one value per row of the table; at least one.
        """
        ranks: dict[int, list[tuple[dict[str, Array], Array]]] = {}
        for rank, table, values in columns:
            ranks.setdefault(rank, []).append((table, values))
        return np.stack([self.mean(own) for own in ranks.values()])


def _band(by_rank: Array) -> tuple[Array, Array, Array]:
    """Return (mean, lower end, upper end) of the band over ranks, each with one value per bin; NaN for an empty bin.

    ``by_rank``: one row per rank, one column per bin. With eight ranks or more, the band leaves out the lowest and the
    highest 5 %.
    """
    ends = (5, 95) if len(by_rank) >= _BAND else (0, 100)
    known = ~np.isnan(by_rank).all(axis=0)
    out = tuple(np.full(by_rank.shape[1], np.nan) for _ in range(3))
    if known.any():
        columns = by_rank[:, known]
        out[0][known] = np.nanmean(columns, axis=0)
        out[1][known], out[2][known] = np.nanpercentile(columns, ends, axis=0)
    return out[0], out[1], out[2]


def _first_rank(run: Run) -> int:
    """Return the number of the first rank of the last attempt; its values are shown where all ranks have the same."""
    return run.last.first.rank
