"""Two runs side by side: the differences of their configurations and figures."""

from __future__ import annotations

from typing import Any

from ..record.reader import Run
from .curves import curves
from .figures import configuration_rows, totals

_FIGURES = (
    ("seconds of a step", "step_seconds", "s"),
    ("samples per second", "samples_per_second", ""),
    ("tokens per second", "tokens_per_second", ""),
    ("last loss", "loss", ""),
    ("steps", "steps", ""),
    ("skipped steps", "skipped", ""),
    ("process memory, peak", "process_bytes", "B"),
    ("device memory, peak", "device_bytes", "B"),
)
_PER_STEP = (
    ("sent per step, all ranks", "sent_bytes", "B"),
    ("to other nodes per step", "across_bytes", "B"),
    ("read from tiers per step", "read_bytes", "B"),
    ("written to tiers per step", "written_bytes", "B"),
)


def comparison(run: Run, other: Run, other_sentence: str) -> dict[str, Any]:
    """Return the page's data about ``other`` beside ``run``, by name.

    It has differences of the configurations, figures of both runs (``here`` and ``there``), and the curves of
    ``other``. ``other_sentence``: the sentence of its verdict.
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
    for owner in here["memory"]:
        figures.append(
            {"name": f"{owner}, peak", "unit": "B", "here": here["memory"][owner], "there": there["memory"][owner]}
        )
    drawn = curves(other)
    wanted = ("step", "loss", "seconds", "samples", "tokens")
    return {
        "path": str(other.path),
        "sentence": other_sentence,
        "configuration": _differences(run, other),
        "figures": [row for row in figures if row["here"] or row["there"]],
        "curves": {name: drawn[name] for name in wanted if name in drawn},
    }


def _differences(run: Run, other: Run) -> list[list[Any]]:
    """Return [path, value in run, value in other] of every differing setting, version and fact about the machine,
    sorted.

    A value is None if it is absent. The runs' last attempts are compared.
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


def _per_step(sums: dict[str, Any], key: str) -> float:
    """Return a total of `figures.totals`, by its name ``key``, divided by the run's steps; 0 without steps."""
    return float(sums[key] / sums["steps"]) if sums["steps"] else 0.0
