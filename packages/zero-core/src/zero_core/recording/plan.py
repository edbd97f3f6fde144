"""Record the plan of a run beside its measurements: its memory and rates, and where the run departs from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zero_report import RecordWriter

from ..errors import UsageError

if TYPE_CHECKING:
    from ..state import TrainingState

_STATES = ("parameters", "secondary shards", "masters", "moments")
_HELD = ("parameters", "masters", "states")  # owners in the record, of the same bytes
_TOLERANCE = 0.05
_LINKS = {"links of a rank": ("gather", "reduce"), "disk read": ("drive in",), "disk write": ("drive out",)}


@dataclass(frozen=True)
class RunPlan:
    """The estimate of a file that `zero-plan estimate --json` wrote.

    ``device_bytes``: the peak of one rank on its device; ``state_bytes``: one rank's weights, masters and moments in
    memory; ``least_seconds``: the lower bound of a step's time, set by the resource ``binding``; ``rates``: bytes per
    second of one rank, by resource; ``setup``: the settings that the run must share.
    """

    path: str
    device_bytes: int
    state_bytes: int
    least_seconds: float
    binding: str
    rates: Mapping[str, float]
    setup: Mapping[str, int]

    @classmethod
    def load(cls, path: str) -> RunPlan:
        """Return the plan in the file ``path``. Raises `UsageError` if it cannot be read or is not a plan."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = [(str(row["kind"]), str(row["tier"]), int(row["nbytes"])) for row in data["memory"]]
            setup, per_node = data["setup"], int(data["setup"]["ranks_per_node"] or data["setup"]["world_size"])
            shared = {"disk read": per_node, "disk write": per_node}
            return cls(
                path,
                sum(nbytes for _, tier, nbytes in rows if tier == "device"),
                sum(nbytes for kind, tier, nbytes in rows if kind in _STATES and tier != "nvme"),
                float(data["time"]["least"]),
                str(data["time"]["binding"]),
                {
                    row["resource"]: float(row["rate"]) / shared.get(row["resource"], 1)
                    for row in data["bounds"]
                    if row["rate"] is not None
                },
                {name: int(setup[name]) for name in ("stage", "world_size", "accumulation")},
            )
        except OSError as error:
            raise UsageError(f"run_record.plan: {path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"run_record.plan: {path}: expected the output of `zero-plan estimate --json`, got something else "
                f"({type(error).__name__}: {error})"
            ) from error


class PlannedRun:
    """Records a plan at the start, with a warning if it is of another run, and departures from it by more than 5 %."""

    def __init__(self, plan: RunPlan, state: TrainingState, writer: RecordWriter) -> None:
        self._plan = plan
        self._writer = writer
        self._is_of_this_run = True
        bounds = {"least_seconds": plan.least_seconds, "binding": plan.binding, "state_bytes": plan.state_bytes}
        writer.note("plan", path=plan.path, bytes=plan.device_bytes, **bounds)
        for resource, links in _LINKS.items():
            if (rate := plan.rates.get(resource)) is not None:
                for link in links:
                    writer.note("peak", link=link, bytes_per_second=rate, source=f"plan, {resource}")
        actual = {
            "stage": state.config.zero_optimization.stage,
            "world_size": state.partition.data_world_size,
            "accumulation": state.sizes.steps,
        }
        apart = [f"{name} {said}, here {actual[name]}" for name, said in plan.setup.items() if said != actual[name]]
        if apart:
            writer.note("warning", text=f"{plan.path} is the plan of another run: {'; '.join(apart)}")
            self._is_of_this_run = False

    def compare(self, owners: Mapping[str, int]) -> None:
        """Record a warning if model state departs from the plan; ``owners``: the peak bytes of a step by owner."""
        whole = ("gathered",) if self._plan.setup["stage"] < 3 else ()  # else they come and go
        held = sum(owners.get(owner, 0) for owner in (*_HELD, *whole))
        planned = self._plan.state_bytes
        if self._is_of_this_run and planned and abs(held - planned) > _TOLERANCE * planned:
            self._writer.note(
                "warning",
                text=f"weights, masters and moments take {held:,} bytes of memory, {abs(held / planned - 1):.0%} "
                f"{'more' if held > planned else 'less'} than the {planned:,} of {self._plan.path}",
            )
