"""Compare a run with the plan that its configuration names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zero_report import RecordWriter
from zero_report.record.planned import PlanFileError, PlannedRun, RunPlan

from ..errors import UsageError

if TYPE_CHECKING:
    from zero_settings import Config

    from ..state import TrainingState

logger = logging.getLogger("zero_core")


def load_plan(config: Config, rank: int) -> RunPlan | None:
    """Return the plan for ``rank`` from the file ``run_record.plan``; None if no file is named. Raises `UsageError` for
    a file that holds no plan."""
    try:
        return None if config.run_record.plan is None else RunPlan.load(config.run_record.plan, rank)
    except PlanFileError as error:
        raise UsageError(f"run_record.plan: {error}") from error


def planned_run(plan: RunPlan | None, state: TrainingState, writer: RecordWriter) -> PlannedRun | None:
    """Record the plan and return the object that compares the run with it and logs warnings; None without a plan."""
    actual = {
        "stage": state.config.zero_optimization.stage,
        "world_size": state.partition.data_world_size,
        "accumulation": state.sizes.steps,
    }
    return None if plan is None else PlannedRun(plan, writer, actual, logger.warning)
