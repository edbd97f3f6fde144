"""The least time of a dry run's step on a machine, resource by resource."""

from __future__ import annotations

from .limits import Bound, both_ways, one_after_another
from .machine import Machine
from .planned import RankPlan

_RATES = {"float32": ("tf32", "fp32"), "float16": ("fp16",), "bfloat16": ("bf16",), "float64": ()}
_UPDATED = ("masters", "optimizer states")
_READ_AND_WRITE = 2  # an update reads and writes its states once


def step_bounds(rank: RankPlan, machine: Machine, *, world_size: int) -> tuple[Bound, ...]:
    """Return the bound of every resource that a planned step of one rank uses; no rate is lowered by an assumed
    efficiency. Raises `PlanError` if the machine gives no ``node.devices``.

    The ranks of a node (``node.devices``) share its memory and drives, and are assumed to move as many bytes each. The
    bytes that leave a node are at least those that this rank sends to other nodes. float32 counts at the rate of tf32
    if the machine gives one, as torch may use that. Operations in float8 and float64 have no bound. Fused attention
    counts as matrix products if the machine gives no rate of its own for it. A device runs its products, its attention,
    its other operations and its update one after another.
    """
    per_node = min(int(machine.need("node.devices")), world_size)
    links = rank.bytes_by_link()
    held = {tier: _READ_AND_WRITE * nbytes for tier, nbytes in _updated_bytes(rank).items()}
    on_host = per_node * (held.get("host", 0) + held.get("nvme", 0))
    apart = {dtype: flops for dtype, flops in rank.attention.items() if machine.get(_attention_key(dtype)) is not None}
    table: list[tuple[str, float, str]] = [
        (f"matrix products, {dtype}", flops - apart.get(dtype, 0), _rate_key(dtype, machine))
        for dtype, flops in sorted(rank.flops.items())
    ]
    table += [(f"attention, {dtype}", flops, _attention_key(dtype)) for dtype, flops in sorted(apart.items())]
    table += [
        ("links of a rank", links["inside a node"] + links["between nodes"], "node.link"),
        ("network between nodes", links["between nodes"], "network.per_node"),
        ("device memory, other operations", rank.moved, "device.memory_bandwidth"),
        ("device memory, update", held.get("device", 0), "device.memory_bandwidth"),
        ("host memory, update", on_host, "node.host_memory_bandwidth"),
        ("disk read", per_node * rank.read, "disk.read"),
        ("disk write", per_node * rank.written, "disk.write"),
    ]
    rows = [Bound(name, amount, machine.get(key), key) for name, amount, key in table if amount]
    rows += one_after_another(rows)
    rows += both_ways(machine, per_node * rank.read, per_node * rank.written)
    return tuple(_with_network_rate(row, machine, per_node, world_size) for row in rows)


def _updated_bytes(rank: RankPlan) -> dict[str, int]:
    """Return, by tier, the bytes of ``rank``'s masters and optimizer states, which a step updates."""
    found: dict[str, int] = {}
    for row in rank.held:
        if row.kind in _UPDATED:
            found[row.tier] = found.get(row.tier, 0) + row.nbytes
    return found


def _rate_key(dtype: str, machine: Machine) -> str:
    """Return the machine's key of the fastest rate at which matrix products in ``dtype`` (a name of torch) may run; a
    key that no machine has if there is no rate.
    """
    known = [f"device.{name}" for name in _RATES.get(dtype, ()) if machine.get(f"device.{name}") is not None]
    return known[0] if known else f"device.{dtype}"


def _attention_key(dtype: str) -> str:
    """Return the machine's key of the rate of fused attention in ``dtype`` (a name of torch); a key that no machine has
    if there is no rate.
    """
    names = _RATES.get(dtype) or (dtype,)
    return f"device.attention_{names[-1]}"


def _with_network_rate(row: Bound, machine: Machine, per_node: int, world_size: int) -> Bound:
    """Return ``row`` with the network's rate added if it is the row of a rank's links and there are several nodes, as
    the rank sends over both; without a rate if the machine does not give the network's. Other rows are returned
    unchanged.

    ``per_node``: ranks of a node. The whole network of a node counts, which keeps the time a lower bound.
    """
    if row.key != "node.link" or per_node == world_size or row.rate is None:
        return row
    network = machine.get("network.per_node")
    return row._replace(rate=None, key="network.per_node") if network is None else row._replace(rate=row.rate + network)
