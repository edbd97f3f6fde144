"""Two runs side by side: the differences of their configurations and figures."""

from __future__ import annotations

from typing import Any

from ..analysis.analyse import Analysis
from ..analysis.waiting import CauseKind
from ..record.reader import Run
from .curves import curves
from .figures import configuration_rows, totals

_FIGURES = (
    ("seconds of a step", "step_seconds", "s"),
    ("samples per second", "samples_per_second", ""),
    ("tokens per second", "tokens_per_second", ""),
    ("last loss", "loss", ""),
    ("steps", "steps", ""),
    ("seconds of all steps", "seconds", "s"),
    ("skipped steps", "skipped", ""),
    ("steps done again after a restart", "replayed", ""),
    ("process memory, peak", "process_bytes", "B"),
    ("device memory, peak", "device_bytes", "B"),
)
_PER_STEP = (
    ("sent per step, all ranks", "sent_bytes", "B"),
    ("to other nodes per step", "across_bytes", "B"),
    ("read from tiers per step", "read_bytes", "B"),
    ("written to tiers per step", "written_bytes", "B"),
    ("collectives per step, all ranks", "collectives", ""),
)
_CAUSES: dict[CauseKind, str] = {
    "data": "data loaders",
    "tier": "tiers",
    "rank": "slower ranks",
    "link": "links",
    "save": "checkpoints",
}


def comparison(run: Run, analysis: Analysis, other: Run, other_analysis: Analysis) -> dict[str, Any]:
    """Return the page's data about ``other`` beside ``run``, by name; the analyses are of the two runs.

    It has the sentence of the other verdict, differences of the configurations, figures of both runs (``here`` and
    ``there``, None for a link that a run does not have), and the curves of ``other``.
    """
    here, there = totals(run), totals(other)
    figures = [{"name": name, "unit": unit, "here": here[key], "there": there[key]} for name, key, unit in _FIGURES]
    for name, key, unit in _PER_STEP:
        figures.append({"name": name, "unit": unit, "here": _per_step(here, key), "there": _per_step(there, key)})
    for group in ("phases", "waits"):
        for key in here[group]:
            figures.append(
                {
                    "name": f"{key.replace('_', ' ')}, share of the time",
                    "unit": "%",
                    "here": here[group][key] / here["rank_seconds"],
                    "there": there[group][key] / there["rank_seconds"],
                }
            )
    share = "computing, share of the time"
    figures.append({"name": share, "unit": "%", "here": _computing_share(here), "there": _computing_share(there)})
    figures += _analysed_figures(analysis, other_analysis)
    for owner in here["memory"]:
        figures.append(
            {"name": f"{owner}, peak", "unit": "B", "here": here["memory"][owner], "there": there["memory"][owner]}
        )
    drawn = curves(other)
    wanted = ("step", "loss", "seconds", "samples", "tokens")
    return {
        "path": str(other.path),
        "sentence": other_analysis.verdict.sentence,
        "configuration": _differences(run, other),
        "figures": [row for row in figures if row["here"] or row["there"]],
        "curves": {name: drawn[name] for name in wanted if name in drawn},
    }


def _differences(run: Run, other: Run) -> list[list[Any]]:
    """Return [path, value in run, value in other] for every setting, version and fact about the machine that differs
    between the last attempts of two runs, sorted.

    A value is None if it is absent.
    """
    here = {str(row[0]): row for row in configuration_rows(run.last)}
    there = {str(row[0]): row for row in configuration_rows(other.last)}
    here["ranks"], there["ranks"] = ["ranks", run.last.world_size, ""], ["ranks", other.last.world_size, ""]
    for facts, rows in ((run.last.facts, here), (other.last.facts, there)):
        for group in ("versions", "machine"):
            values = facts.get(group, {})
            rows.update({f"{group}.{key}": [key, value, ""] for key, value in values.items()})
    differing = []
    for path in sorted({*here, *there}):
        left, right = here.get(path), there.get(path)
        if left is None or right is None or left[1] != right[1]:
            differing.append([path, None if left is None else left[1], None if right is None else right[1]])
    return differing


def _computing_share(sums: dict[str, Any]) -> float:
    """Return the share of the time of all ranks in which they computed; ``sums``: see `figures.totals`."""
    return float(sums["compute"] / sums["rank_seconds"])


def _analysed_figures(here: Analysis, there: Analysis) -> list[dict[str, Any]]:
    """Return rows of figures of two analyses: the share of the step that each kind of cause took, and the rate of each
    link, in bytes per second of one rank."""
    rows: list[dict[str, Any]] = []
    shares = [{share.kind: share.share for share in analysis.causes.by_kind} for analysis in (here, there)]
    for kind, causes in _CAUSES.items():
        left, right = (found.get(kind, 0.0) for found in shares)
        rows.append({"name": f"lost by {causes}, share of the step", "unit": "%", "here": left, "there": right})
    rates = [{link.name: link.rate for link in analysis.links} for analysis in (here, there)]
    for link in dict.fromkeys([*rates[0], *rates[1]]):
        here_rate, there_rate = (found.get(link) for found in rates)
        rows.append({"name": f"{link}, bytes per second", "unit": "B", "here": here_rate, "there": there_rate})
    return rows


def _per_step(sums: dict[str, Any], key: str) -> float:
    """Return the total ``sums[key]`` of `figures.totals` divided by the run's number of steps; 0 without steps."""
    return float(sums[key] / sums["steps"]) if sums["steps"] else 0.0
