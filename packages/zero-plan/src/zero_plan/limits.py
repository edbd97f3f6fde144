"""Lower bounds on the time of a step by each resource alone, the resource that binds, and the wear of drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .errors import PlanError
from .machine import Machine
from .setup import Setup
from .traffic import LinkBytes, TierBytes

ADAM_BYTES = 28
"""Bytes of memory traffic per parameter of an Adam step in float32: weight and two moments read and written, gradient
read."""
_ON_DEVICE = ("matrix products", "attention", "device memory")


class Bound(NamedTuple):
    """The least time per step that one resource takes: ``amount`` / ``rate``.

    ``amount``: bytes, floating-point operations or (of what a device computes in all) seconds in a step, of all ranks
    that share the resource. ``rate``: per second; None if the machine does not give it. ``key``: the machine's key of
    ``rate``. ``is_sum``: the amount is that of other rows together, which share the resource.
    """

    resource: str
    amount: float
    rate: float | None
    key: str
    is_sum: bool = False

    @property
    def seconds(self) -> float | None:
        """The bound in seconds; None if the rate is not known."""
        return None if self.rate is None else self.amount / self.rate


def bounds(
    machine: Machine, setup: Setup, *, flops: float, dtype: str, links: LinkBytes, tiers: TierBytes, shard: int
) -> tuple[Bound, ...]:
    """Return the bound of every resource that the step uses; no rate is lowered by an assumed efficiency.

    ``flops``: of one rank per step, in ``dtype``. ``links``, ``tiers``: results of `link_bytes` and `tier_bytes`.
    ``shard``: elements that one rank updates. Sending and receiving overlap, and so do reads and writes of drives. The
    ranks of a node share its network, main memory and drives.
    """
    ranks = setup.per_node
    update = ADAM_BYTES * shard
    on_host = setup.offload_optimizer != "device"
    table = [
        ("matrix products", flops, f"device.{dtype}"),
        ("links of a rank", links.per_rank, "node.link"),
        ("network between nodes", links.across_per_node, "network.per_node"),
        ("device to host", tiers.device_to_host, "node.device_to_host"),
        ("host to device", tiers.host_to_device, "node.host_to_device"),
        ("device memory, update", 0 if on_host else update, "device.memory_bandwidth"),
        ("host memory, update", ranks * update if on_host else 0, "node.host_memory_bandwidth"),
        ("disk read", ranks * tiers.disk_read, "disk.read"),
        ("disk write", ranks * tiers.disk_write, "disk.write"),
    ]
    rows = [Bound(name, amount, machine.get(key), key) for name, amount, key in table if amount]
    rows += both_ways(machine, ranks * tiers.disk_read, ranks * tiers.disk_write)
    return tuple(_with_network_rate(row, machine, setup) if row.key == "node.link" else row for row in rows)


def one_after_another(rows: Sequence[Bound]) -> list[Bound]:
    """Return, as a list of one row, the bound of all that a device computes one thing after another: the sum of the
    times of those ``rows`` that bound the device itself (products, attention, memory). Empty if fewer than two of these
    times are known.
    """
    known = [row.seconds for row in rows if row.resource.startswith(_ON_DEVICE) and row.seconds is not None]
    return [Bound("device, all it computes", sum(known), 1.0, "device", is_sum=True)] if len(known) > 1 else []


def both_ways(machine: Machine, read: float, written: float) -> list[Bound]:
    """Return, as a list of one row, the bound of drives that read ``read`` bytes and write ``written`` bytes at the
    same time; empty if they do only one of the two, or if the machine does not give the rate.
    """
    rate = machine.get("disk.read_and_write")
    if rate is None or not read or not written:
        return []
    return [Bound("disk, both ways", read + written, rate, "disk.read_and_write", is_sum=True)]


def _with_network_rate(row: Bound, machine: Machine, setup: Setup) -> Bound:
    """Return ``row``, the bound of a rank's links, with the rank's share of the network added to its rate if there are
    several nodes; without a rate if the machine does not give the network's.
    """
    if setup.nodes == 1 or row.rate is None:
        return row
    network = machine.get("network.per_node")
    if network is None:
        return row._replace(rate=None, key="network.per_node")
    return row._replace(rate=row.rate + network / setup.per_node)


class StepTime(NamedTuple):
    """Bounds on the seconds of a step.

    ``least``: of the resource that binds, if all others overlap with it. ``most``: of all resources one after another,
    each at its full rate. ``binding``: the name of the resource that binds. ``unknown``: keys of rates that the machine
    does not give; these resources are left out.
    """

    least: float
    most: float
    binding: str
    unknown: tuple[str, ...]

    @property
    def hidden(self) -> float:
        """The most seconds that overlap can hide."""
        return self.most - self.least


def step_time(rows: tuple[Bound, ...]) -> StepTime:
    """Return the bounds on the time of a step; ``rows``: the bounds of its resources. Raises `PlanError` if no rate is
    known.
    """
    known = [(row.seconds, row.resource) for row in rows if row.seconds is not None]
    apart = sum(row.seconds for row in rows if row.seconds is not None and not row.is_sum)
    unknown = tuple(row.key for row in rows if row.seconds is None)
    if not known:
        raise PlanError(f"nothing bounds the step: the machine gives none of {', '.join(unknown) or 'the rates'}")
    least, binding = max(known)
    return StepTime(least, max(least, apart), binding, unknown)


class Wear(NamedTuple):
    """The wear of one node's drives.

    ``terabytes_per_1000_steps``: written to them, in 1e12 bytes. ``steps``: how many use up their rated endurance; None
    if that is not known.
    """

    terabytes_per_1000_steps: float
    steps: float | None


def wear(machine: Machine | None, written: int) -> Wear | None:
    """Return the wear of the drives of a node if each step writes ``written`` bytes to them; None if that is 0.

    ``machine``: None if the drives' endurance is not known.
    """
    if not written:
        return None
    endurance = None if machine is None else machine.get("disk.endurance")
    return Wear(written * 1000 / 1e12, None if endurance is None else endurance / written)
