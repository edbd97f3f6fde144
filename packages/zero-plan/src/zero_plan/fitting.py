"""`fits`: whether a run fits on a machine, by a dry run, and with how many bytes to spare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .dry import plan
from .errors import PlanError
from .estimate import CAPACITY, Fit
from .machine import Machine, load_machine
from .planned import Plan
from .quantities import format_quantity
from .setup import TIERS, Tier

if TYPE_CHECKING:
    import torch
    from torch import nn

_TIER_OF: dict[str, Tier] = {"device": "device", "pinned host": "host", "pageable host": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class FitAnswer:
    """The answer of `fits`. True if everything fits on every tier that the run uses; a tier whose capacity the machine
    does not give counts as one that does not fit (see `unknown`).

    ``rows``: one per tier on which some rank needs bytes, for the rank that needs most: the bytes of one device, and of
    a node's host memory and drives if all its ranks need as much. ``plan``: the result of the dry run.
    """

    rows: tuple[Fit, ...]
    plan: Plan

    @property
    def unknown(self) -> tuple[Tier, ...]:
        """The tiers whose capacity the machine does not give."""
        return tuple(row.tier for row in self.rows if row.capacity is None)

    def __bool__(self) -> bool:
        """Return whether everything fits on every tier; False if the capacity of one is unknown."""
        return all(row.fits for row in self.rows)

    def __str__(self) -> str:
        """Return a clause for each tier that says whether it fits, with how many bytes to spare or too many."""
        return "; ".join(map(_verdict_text, self.rows))


def fits(
    model_fn: Callable[[], nn.Module],
    config: Any,
    *,
    batch: Any,
    world_size: int,
    machine: Machine | str,
    ranks: Iterable[int] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    checkpoint: bool = False,
    saved_by: int | None = None,
) -> FitAnswer:
    """Return whether a run fits on a machine, and the needed and available bytes of each tier.

    ``machine``: a `Machine`, the name of a preset, or the path of a machine file. ``checkpoint``: its saves and loads
    have to fit, too. The other arguments and the errors are those of `zero_plan.plan`; also raises `PlanError` for an
    unknown machine. A tier whose capacity the machine does not give counts as one that does not fit; see
    `FitAnswer.unknown`.
    """
    given = load_machine(machine) if isinstance(machine, str) else machine
    asked: dict[str, Any] = {"ranks": ranks, "loss": loss, "checkpoint": checkpoint, "saved_by": saved_by}
    found = plan(model_fn, config, batch=batch, world_size=world_size, **asked)
    return judge_fit(found, given)


def judge_fit(found: Plan, machine: Machine) -> FitAnswer:
    """Return whether the planned run ``found`` fits on ``machine``. Raises `PlanError` for a plan without ranks, and if
    the machine gives no ``node.devices``.
    """
    if not found.ranks:
        raise PlanError("ranks: expected at least one, got none")
    per_node = min(int(machine.need("node.devices")), found.world_size)
    most: dict[Tier, int] = {}
    for rank in found.ranks:
        needs: dict[Tier, int] = {}
        for tier, nbytes in rank.needs().items():
            needs[_TIER_OF[tier]] = needs.get(_TIER_OF[tier], 0) + nbytes
        most = {tier: max(most.get(tier, 0), needs.get(tier, 0)) for tier in TIERS}
    sharing = {tier: 1 if tier == "device" else per_node for tier in TIERS}
    rows = (Fit(tier, most[tier] * sharing[tier], machine.get(CAPACITY[tier])) for tier in TIERS if most[tier])
    return FitAnswer(tuple(rows), found)


def _verdict_text(row: Fit) -> str:
    """Return a clause that says whether the tier of ``row`` fits, with how many bytes to spare or too many."""
    where = "the device" if row.tier == "device" else f"{row.tier} of a node"
    if row.capacity is None:
        return f"{where} needs {format_quantity(row.needed, 'B')}, and the machine does not give {CAPACITY[row.tier]}"
    free = row.capacity - row.needed
    verdict = (
        f"fits, {format_quantity(free, 'B')} free"
        if free >= 0
        else f"does not fit, {format_quantity(-free, 'B')} too many"
    )
    return f"{where} {verdict}: {format_quantity(row.needed, 'B')} of {format_quantity(row.capacity, 'B')}"
