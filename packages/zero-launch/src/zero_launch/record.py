"""The record that ranks write for a report, and what the launcher adds about the job's failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_launch.desync import FlightRecord
from zero_launch.report import LaunchError

RECORD_VARIABLE = "ZERO_RUN_RECORD"
"""The environment variable that tells ranks where to record."""
_FAILURE = "failure.json"
_REPORT_SECONDS = 120.0
_FLIGHT_ENTRIES = 8


def record_variables(folder: str | None) -> dict[str, str]:
    """Return the variables that have ranks record into ``folder``; none for None."""
    return {} if folder is None else {RECORD_VARIABLE: os.path.abspath(folder)}


def record_failure(folder: str, error: LaunchError) -> str | None:
    """Write how the job failed into the record ``folder``, and make the report if zero-report is installed.

    Return what `python -m zero_report` prints, the report's path; None if it made none, for example because no rank had
    begun to record, or took more than 2 minutes. ``folder`` is made if it is missing.
    """
    first, *others = str(error).splitlines() or ["the job failed"]
    return _write_failure(folder, first, others, error.flight, interrupted=False)


def record_interruption(environment: Mapping[str, str], why: str, flight: Mapping[int, FlightRecord]) -> str | None:
    """Write, for a job that a signal ended, into the record folder that ZERO_RUN_RECORD in ``environment`` names, make
    the report, and return its path, as `record_failure` does; without that variable do nothing and return None.

    ``why``: the signal, as text. ``flight``: contents of the flight recorders, by rank.
    """
    folder = environment.get(RECORD_VARIABLE)
    return None if folder is None else _write_failure(folder, why, [], flight, interrupted=True)


def _write_failure(
    folder: str, first: str, others: Sequence[str], flight: Mapping[int, FlightRecord], *, interrupted: bool
) -> str | None:
    """Write `failure.json` into ``folder``, and make the report; return its path or None, as `record_failure` does.

    ``first``, ``others``: the lines of the error. ``flight``: by rank. ``interrupted``: a signal ended the job.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    failure = {
        "at": time.time(),
        "text": first,
        "detail": "\n".join(others),
        "interrupted": interrupted,
        "flight": [_flight_summary(rank, record) for rank, record in sorted(flight.items())],
    }
    (target / _FAILURE).write_text(json.dumps(failure), encoding="utf-8")
    if find_spec("zero_report") is None:
        return None
    command = [sys.executable, "-m", "zero_report", str(target)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=_REPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return made.stdout.strip() or None


def _flight_summary(rank: int, record: FlightRecord) -> dict[str, Any]:
    """Return one rank's part of `failure.json`: its last 8 collectives as text, the newest last, the one in which it
    waits or waited last (or None), and the number that it has started."""
    awaited = record.last_awaited
    return {
        "rank": rank,
        "waits": None if awaited is None else f"{awaited.sequence}: {awaited}",
        "last": [f"{entry.sequence}: {entry}" for entry in record.entries[-_FLIGHT_ENTRIES:]],
        "started": record.started,
    }
