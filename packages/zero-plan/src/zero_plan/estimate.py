"""All formulas together: memory by tier, bytes by link, operations, and bounds on the time of one step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .activations import activation_bytes
from .engine_memory import MomentLoad, engine_memory
from .errors import PlanError
from .limits import Bound, StepTime, Wear, bounds, step_time, wear
from .machine import Machine
from .setup import TIERS, Setup, Tier
from .states import StateRow, by_tier, model_states
from .traffic import Collective, LinkBytes, TierBytes, collectives, link_bytes, tier_bytes
from .transformer import Transformer, step_flops

CAPACITY = {"device": "device.memory", "host": "node.host_memory", "nvme": "disk.capacity"}
"""Tier -> key of its capacity in a machine file."""


@dataclass(frozen=True)
class Fit:
    """The bytes that are needed and available on one tier: of one device, or of a node's host memory or drives.

    ``needed``: by one rank on the device, by all ranks of a node on the other tiers. ``capacity``: None if the machine
    does not give it.
    """

    tier: Tier
    needed: int
    capacity: float | None

    @property
    def fits(self) -> bool | None:
        """True if the needed bytes are available; None if the capacity is not known."""
        return None if self.capacity is None else self.needed <= self.capacity


@dataclass(frozen=True)
class StepEstimate:
    """The needs of one rank's step: bytes, floating-point operations, seconds.

    ``params``: parameters of the model. ``states``: parameters, masters and moments. ``residual``: gradients, buffers
    and activations of zero-core's engine at the moment that needs most on the device.
    ``fits``: needed and available bytes by tier. ``links``, ``tiers``: bytes moved. ``flops``: operations of the step.
    ``time``, ``bounds``: lower bounds. ``wear``: None if the step writes nothing to drives.
    """

    params: int
    setup: Setup
    states: tuple[StateRow, ...]
    residual: tuple[StateRow, ...]
    fits: tuple[Fit, ...]
    collectives: tuple[Collective, ...]
    links: LinkBytes
    tiers: TierBytes
    flops: int
    bounds: tuple[Bound, ...]
    time: StepTime
    wear: Wear | None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, and the numbers that properties compute, as plain data for JSON."""
        return {
            "params": self.params,
            "setup": asdict(self.setup),
            "memory": [row._asdict() for row in (*self.states, *self.residual)],
            "fits": [{**asdict(row), "fits": row.fits} for row in self.fits],
            "collectives": [asdict(row) for row in self.collectives],
            "links": self.links._asdict(),
            "tiers": self.tiers._asdict(),
            "flops": self.flops,
            "bounds": [{**row._asdict(), "seconds": row.seconds} for row in self.bounds],
            "time": {**self.time._asdict(), "hidden": self.time.hidden},
            "wear": None if self.wear is None else self.wear._asdict(),
        }


def estimate_step(
    shape: Transformer,
    setup: Setup,
    machine: Machine,
    *,
    micro_batch: int = 1,
    dtype: str = "bf16",
    checkpointing: str = "none",
    offload_activations: bool = False,
) -> StepEstimate:
    """Return memory, traffic, operations and time bounds of one step of a transformer with zero-core's engine.

    ``micro_batch``: sequences per rank. ``dtype``: of the matrix products, a rate of the machine. ``checkpointing``:
    see `zero_plan.CHECKPOINTING`. ``offload_activations``: block inputs wait on the host, with full checkpointing.
    Raises `PlanError` for a combination that is not possible.
    """
    if offload_activations and checkpointing != "full":
        raise PlanError(f"offload_activations: expected checkpointing 'full', got {checkpointing!r}")
    itemsize = setup.bytes.parameter
    states = tuple(row for row in model_states(shape.units, setup) if row.kind != "gradients")
    options: dict[str, Any] = {"checkpointing": checkpointing, "itemsize": itemsize}
    load = MomentLoad.of(shape, micro_batch, **options, on_host=offload_activations)
    moved = activation_bytes(shape, micro_batch, **options) if offload_activations else 0
    residual = (StateRow("activations", "host", moved), *engine_memory(shape, setup, load))
    rows = collectives(shape.units, setup, kept=len(shape.units) - 1)
    links = link_bytes(rows, setup)
    tiers = tier_bytes(shape.units, setup, checkpoints=moved, checkpoints_on_host=offload_activations)
    flops = step_flops(shape, micro_batch, accumulation=setup.accumulation, checkpointing=checkpointing)
    shard = sum(setup.shard(size) for size in shape.units) if setup.stage else shape.params
    limits = bounds(machine, setup, flops=flops, dtype=dtype, links=links, tiers=tiers, shard=shard)
    return StepEstimate(
        params=shape.params,
        setup=setup,
        states=states,
        residual=tuple(row for row in residual if row.nbytes),
        fits=_fits_by_tier((*states, *residual), setup, machine),
        collectives=rows,
        links=links,
        tiers=tiers,
        flops=flops,
        bounds=limits,
        time=step_time(limits),
        wear=wear(machine, setup.per_node * tiers.disk_write),
    )


def _fits_by_tier(rows: tuple[StateRow, ...], setup: Setup, machine: Machine) -> tuple[Fit, ...]:
    """Return the needed and available bytes of each tier in use.

    ``rows``: the needs of one rank. A device holds those of one rank, a node's memory and drives those of all its
    ranks.
    """
    found = by_tier(rows)
    needs = {tier: found.get(tier, 0) * (1 if tier == "device" else setup.per_node) for tier in TIERS}
    return tuple(Fit(tier, need, machine.get(CAPACITY[tier])) for tier, need in needs.items() if need)
