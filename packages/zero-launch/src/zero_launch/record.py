"""The record that ranks write for a report, and the launcher's word about how the job ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from zero_launch.report import LaunchError

RECORD_VARIABLE = "ZERO_RUN_RECORD"
"""The environment variable that tells ranks where to record."""
_FAILURE = "failure.json"
_REPORT_SECONDS = 120.0


def record_variables(folder: str | None) -> dict[str, str]:
    """Return what ranks need to record into ``folder``; nothing for None."""
    return {} if folder is None else {RECORD_VARIABLE: os.path.abspath(folder)}


def record_failure(folder: str, error: LaunchError) -> str | None:
    """Write how the job failed into the record, first cause first, and have the report made where its command is.

    Return the report's path; None where none was made, as when no rank had begun to record.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    lines = str(error).splitlines()
    failure = {"at": time.time(), "text": lines[0] if lines else "the job failed", "detail": "\n".join(lines[1:])}
    (target / _FAILURE).write_text(json.dumps(failure), encoding="utf-8")
    command = shutil.which("zero-report")
    if command is None:
        return None
    try:
        made = subprocess.run(
            [command, str(target)], capture_output=True, text=True, timeout=_REPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return made.stdout.strip() or None
