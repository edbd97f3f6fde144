"""The plan of a run beside its record: what it says of one rank, and where the run departs from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .writer import RecordWriter

COMPARED_STEP = 3
"""The step that is compared; in those before it an engine may still learn what a step needs."""
_TOLERANCE = 0.05
_ESTIMATED = ("parameters", "secondary shards", "masters", "moments")
_HELD = ("parameter shards", "secondary shards", "placeholders", "masters", "optimizer states")
_OWNERS = ("parameters", "masters", "states")  # owners in a record, of the same bytes
_LINKS = {"links of a rank": ("gather", "reduce"), "disk read": ("drive in",), "disk write": ("drive out",)}


class PlanFileError(ValueError):
    """Raised if a file cannot be read or is no plan; the message names it."""


@dataclass(frozen=True)
class RunPlan:
    """A plan's figures for one rank. `zero-plan estimate --json`, `zero-plan model --json` and `zero-plan run --json`
    print plans.

    ``path``: the plan's file; ``device_bytes``: the peak on its device; ``state_bytes``: its weights, masters and
    moments in memory; ``sent_bytes``: sent in a step, without control messages, None if the plan does not say;
    ``bounds``: the lower bound of a step's time (``least_seconds``) and the resource that sets it (``binding``), empty
    if they are not known; ``rates``: bytes per second of one rank, by resource; ``setup``: the settings that the run
    must share, by name (``stage``, ``world_size``, ``accumulation``).
    """

    path: str
    device_bytes: int
    state_bytes: int
    sent_bytes: int | None
    bounds: Mapping[str, Any]
    rates: Mapping[str, float]
    setup: Mapping[str, int]

    @classmethod
    def load(cls, path: str, rank: int) -> RunPlan:
        """Return what the plan in the file ``path`` says of ``rank``, or of the planned rank with the nearest number.

        Raises `PlanFileError` if it cannot be read or is no plan.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return _dry_run_plan(path, data, rank) if "ranks" in data else _estimated_plan(path, data)
        except OSError as error:
            raise PlanFileError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise PlanFileError(
                f"{path}: expected the output of `zero-plan estimate --json`, `model --json` or `run --json`, got "
                f"something else ({type(error).__name__}: {error})"
            ) from error


def _estimated_plan(path: str, data: Mapping[str, Any]) -> RunPlan:
    """Return the plan in ``data``, which `zero-plan estimate` printed into the file ``path``; the same for every rank.

    Raises KeyError, ValueError or TypeError if it is no such plan.
    """
    rows = [(str(row["kind"]), str(row["tier"]), int(row["nbytes"])) for row in data["memory"]]
    setup, per_node = data["setup"], int(data["setup"]["ranks_per_node"] or data["setup"]["world_size"])
    return RunPlan(
        path,
        sum(nbytes for _, tier, nbytes in rows if tier == "device"),
        sum(nbytes for kind, tier, nbytes in rows if kind in _ESTIMATED and tier != "nvme"),
        None,
        {"least_seconds": float(data["time"]["least"]), "binding": str(data["time"]["binding"])},
        _rates(data["bounds"], per_node),
        {name: int(setup[name]) for name in ("stage", "world_size", "accumulation")},
    )


def _dry_run_plan(path: str, data: Mapping[str, Any], rank: int) -> RunPlan:
    """Return the plan in ``data``, which `zero-plan run` or `zero-plan model` printed into the file ``path``, for the
    planned rank nearest to ``rank``.

    Made with ``--machine`` it has times and rates. Raises KeyError, IndexError, ValueError or TypeError if it is no
    such plan.
    """
    plan = min(data["ranks"], key=lambda planned: abs(int(planned["rank"]) - rank))
    setup = {name: int(plan[name]) for name in ("stage", "accumulation")}
    held = _HELD if setup["stage"] >= 3 else (*_HELD, "gathered parameters")
    times = next((row for row in data.get("times", ()) if row["rank"] == plan["rank"]), None)
    time = {} if times is None else times["time"]
    return RunPlan(
        path,
        int(plan["peaks"][0]["nbytes"]),
        sum(int(row["nbytes"]) for row in plan["held"] if row["kind"] in held and row["tier"] != "nvme"),
        sum(int(row["sent_bytes"]) for row in plan["sent"] if row["phase"] != "control"),
        {"least_seconds": float(time["least"]), "binding": str(time["binding"])} if time else {},
        {} if times is None else _rates(times["bounds"], int(data["devices"])),
        {**setup, "world_size": int(data["world_size"])},
    )


def _rates(bounds: Any, per_node: int) -> dict[str, float]:
    """Return the bytes per second of one rank by resource, from ``bounds`` in a plan. A node has ``per_node`` ranks,
    which share its drives.

    Resources without a rate are left out.
    """
    shared = {"disk read": per_node, "disk write": per_node}
    known = [(str(row["resource"]), row["rate"]) for row in bounds if row["rate"] is not None]
    return {resource: float(rate) / shared.get(resource, 1) for resource, rate in known}


class PlannedRun:
    """Writes a plan into the record at the start, and warns if the plan is of another run, or if the run departs from
    it by more than 5 %.

    ``writer``: gets the plan as notes. ``actual``: the run's settings, by the names in ``plan.setup``. ``warn``: is
    called with each warning's text.
    """

    def __init__(
        self, plan: RunPlan, writer: RecordWriter, actual: Mapping[str, int], warn: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._warn = warn
        self._sent_before = 0
        facts = {"path": plan.path, "bytes": plan.device_bytes, "sent_bytes": plan.sent_bytes}
        writer.note("plan", **facts, **plan.bounds, state_bytes=plan.state_bytes)
        for resource, links in _LINKS.items():
            if (rate := plan.rates.get(resource)) is not None:
                for link in links:
                    writer.note("peak", link=link, bytes_per_second=rate, source=f"plan, {resource}")
        apart = [f"{name} {said}, here {actual[name]}" for name, said in plan.setup.items() if said != actual[name]]
        if apart:
            warn(f"{plan.path} is the plan of another run: {'; '.join(apart)}")
        self._is_of_this_run = not apart

    def after_step(self, number: int, owners: Mapping[str, int], sent: int, device: int | None) -> None:
        """Compare the run with its plan after step ``number``, counted from 1 at this start, and warn of departures.

        Only `COMPARED_STEP` is compared, and only if the plan is of this run. ``owners``: the step's peak bytes by
        owner. ``sent``: bytes sent since the start, without control messages. ``device``: the most bytes seen on an
        accelerator in the step, None on the host.
        """
        before, self._sent_before = self._sent_before, sent
        if number != COMPARED_STEP or not self._is_of_this_run:
            return
        whole = ("gathered",) if self._plan.setup["stage"] < 3 else ()  # else they come and go
        held = sum(owners.get(owner, 0) for owner in (*_OWNERS, *whole))
        self._check("weights, masters and moments take", "of memory", held, self._plan.state_bytes)
        if self._plan.sent_bytes is not None:
            self._check("a step sends", "to other ranks", sent - before, self._plan.sent_bytes)
        if device is not None and device > self._plan.device_bytes:  # less may be seen than there was at the peak
            self._check("the peak on the device is", "", device, self._plan.device_bytes)

    def _check(self, what: str, where: str, found: int, planned: int) -> None:
        """Warn if ``found`` bytes depart by more than 5 % from ``planned`` bytes; never if 0 were planned.

        ``what`` and ``where`` are the words before and behind the number of bytes in the warning.
        """
        if planned and abs(found - planned) > _TOLERANCE * planned:
            self._warn(
                f"{what} {found:,} bytes{f' {where}' if where else ''}, {abs(found / planned - 1):.0%} "
                f"{'more' if found > planned else 'less'} than the {planned:,} of {self._plan.path}"
            )
