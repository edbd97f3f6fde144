"""Write the record of a run for `zero_report`. Read `record.py` next; each other file records one thing.

Nothing of `zero_report` is imported, and no thread runs, unless ``run_record.path`` or the environment variable
`RECORD_VARIABLE` names a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import UsageError

if TYPE_CHECKING:
    from zero_report import Report
    from zero_settings import Config

    from ..instruments import Instruments
    from .record import RunRecord

RECORD_VARIABLE = "ZERO_RUN_RECORD"


def record_folder(config: Config) -> Path | None:
    """Return the folder of the run's record, which configuration or environment name; None: nothing is recorded."""
    named = config.run_record.path or os.environ.get(RECORD_VARIABLE)
    return Path(named) if named else None


def open_record(config: Config, device: torch.device) -> RunRecord | None:
    """Open and return this rank's record of a run; None if nothing is recorded. Collective if it is."""
    folder = record_folder(config)
    if folder is None:
        return None
    from zero_report import next_attempt

    from .record import RunRecord

    attempt = torch.zeros(1, dtype=torch.int64, device=device)
    if dist.get_rank() == 0:
        attempt.fill_(next_attempt(folder))
    if dist.get_world_size() > 1:
        dist.broadcast(attempt, 0)
    return RunRecord(folder, config, device, int(attempt))


def report_of(config: Config, instruments: Instruments) -> Report:
    """Return the report on the run so far, made from the record in the folder that ``config`` names, after
    ``instruments`` have written what they still hold. Raises `UsageError` if the run keeps no record."""
    folder = record_folder(config)
    if folder is None:
        raise UsageError(
            'engine.report(): nothing is recorded; add "run_record": {"path": "run/record"} to the configuration'
        )
    from zero_report import make_report

    instruments.flush()
    return make_report(folder)
