"""All data of the page, as one value for JSON."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from .. import __version__
from ..analysis.analyse import Analysis
from ..record.reader import Run
from . import figures
from .compare import comparison
from .curves import curves
from .steps import steps_data

_DIGITS = 6
_LARGE = 1e6  # larger numbers are rounded to integers
_EXACT = 1 << 53  # integers below are exact in JavaScript


def page_data(run: Run, analysis: Analysis, other: tuple[Run, Analysis] | None = None) -> dict[str, Any]:
    """Return the page's data about ``run`` and its analysis, as plain data for JSON without NaN.

    ``other``: another run with its analysis, to compare it with; None for no comparison.
    """
    facts = run.last.facts
    verdict = analysis.verdict
    data = {
        "made": time.time(),
        "version": __version__,
        "title": str(facts.get("title") or run.path.name),
        "path": str(run.path),
        "attempts": len(run.attempts),
        "ranks": run.last.world_size,
        "versions": facts.get("versions", {}),
        "machine": facts.get("machine", {}),
        "problems": run.problems,
        "verdict": {
            "sentence": verdict.sentence,
            "ended": verdict.ended,
            "tone": verdict.tone,
            "detail": verdict.detail,
            "steps": len(analysis.causes.steps),
        },
        "totals": figures.totals(run),
        "causes": figures.cause_rows(analysis),
        "waits": figures.wait_rows(analysis),
        "links": figures.link_rows(analysis),
        "rank_rows": figures.rank_rows(run.last, analysis),
        "checkpoints": figures.checkpoint_rows(run),
        "events": figures.event_rows(run),
        "flight": figures.flight_rows(run),
        "units": figures.unit_rows(analysis),
        "configuration": figures.configuration_rows(run.last),
        "plan": figures.plan_bytes(run),
    }
    data = {name: _exact_data(value) for name, value in data.items()}
    data["curves"] = _rounded_data(curves(run))
    data["steps"] = steps_data(run.last, analysis.causes)
    data["other"] = None
    if other is not None:
        data["other"] = _rounded_data(comparison(run, analysis, *other))
    return data


def _exact_data(value: Any) -> Any:
    """Return ``value`` as plain data for JSON, every number with all its digits: tuples become lists, keys text, whole
    floats integers, NaN and infinities None."""
    if isinstance(value, dict):
        return {str(key): _exact_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact_data(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    return value


def _rounded_data(value: Any) -> Any:
    """Return ``value`` as plain data for JSON, floats rounded to six digits: arrays become lists, NaN and infinities
    None."""
    if isinstance(value, np.ndarray):
        return [_rounded_data(item) for item in value.tolist()]
    if isinstance(value, dict):
        return {str(key): _rounded_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded_data(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return _exact_data(float(f"{value:.{_DIGITS}g}") if abs(value) < _LARGE else float(round(value)))
    return value
