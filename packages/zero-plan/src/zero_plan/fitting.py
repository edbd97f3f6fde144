"""One call, one answer: does a run fit on a machine, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .dry import plan
from .errors import PlanError
from .estimate import CAPACITY, Fit
from .machine import Machine, load_machine
from .planned import Plan
from .quantities import show
from .setup import TIERS, Tier

if TYPE_CHECKING:
    import torch
    from torch import nn

_TIER_OF: dict[str, Tier] = {"device": "device", "pinned host": "host", "pageable host": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class FitAnswer:
    """The answer of `fits`; true where everything fits.

    ``rows``: one per tier, of the rank that needs most: of one device, and of all ranks of a node for its host memory
    and drives. ``plan``: the dry run that says so.
    """

    rows: tuple[Fit, ...]
    plan: Plan

    @property
    def unknown(self) -> tuple[Tier, ...]:
        """The tiers whose capacity the machine does not give."""
        return tuple(row.tier for row in self.rows if row.capacity is None)

    def __bool__(self) -> bool:
        return all(row.fits for row in self.rows)

    def __str__(self) -> str:
        return "; ".join(map(_sentence, self.rows))


def fits(
    model_fn: Callable[[], nn.Module],
    config: Any,
    *,
    batch: Any,
    world_size: int,
    machine: Machine | str,
    ranks: Iterable[int] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> FitAnswer:
    """Return whether a run fits on a machine, and by how many bytes on each tier.

    ``machine``: a `Machine`, the name of a preset, or a machine file. All else is as for `zero_plan.plan`, and so are
    the errors; `PlanError` also for an unknown machine. A tier whose capacity the machine does not give counts as one
    that does not fit; see `FitAnswer.unknown`.
    """
    given = load_machine(machine) if isinstance(machine, str) else machine
    found = plan(model_fn, config, batch=batch, world_size=world_size, ranks=ranks, loss=loss)
    return judge(found, given)


def judge(found: Plan, machine: Machine) -> FitAnswer:
    """Return whether a plan fits on a machine. Raises `PlanError` for a plan without ranks."""
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


def _sentence(row: Fit) -> str:
    where = "the device" if row.tier == "device" else f"{row.tier} of a node"
    if row.capacity is None:
        return f"{where} needs {show(row.needed, 'B')}, and the machine does not give {CAPACITY[row.tier]}"
    free = row.capacity - row.needed
    verdict = f"fits, {show(free, 'B')} free" if free >= 0 else f"does not fit, {show(-free, 'B')} too many"
    return f"{where} {verdict}: {show(row.needed, 'B')} of {show(row.capacity, 'B')}"
