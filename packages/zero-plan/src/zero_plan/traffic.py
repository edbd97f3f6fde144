"""Bytes per step over each link: between ranks, between device and host, to and from NVMe. A unit is the parameters
that are gathered and reduced together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .setup import Setup, unit_sizes

Group = Literal["all", "node", "across"]
SCALE_BYTES = 4
"""Bytes of the scale of one quantized block."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step, all its calls together.

    ``volume``: bytes of the full tensors in the form in which they travel, all calls added up: the M of the papers.
    ``group``: all ranks; the ranks of one node; or the ranks of equal number on all nodes, which have one node's share.
    """

    name: str
    volume: int
    group: Group
    calls: int


def collectives(
    units: int | tuple[int, ...] | list[int], setup: Setup, *, kept: int | None = None
) -> tuple[Collective, ...]:
    """Return the collectives of one step; none in groups of one rank. ``units``: elements of each unit, or of the only
    one. ``kept``: index of the unit that stays gathered between forward and backward, as the engine does with the one
    that backward needs first; None for the papers' formulas, which gather all of them twice.

    Volumes with Ψ parameters and A micro-batches (Rajbhandari et al. 2020, arXiv 1910.02054v3, section 7, for A = 1):
    stages 0 and 1 reduce once, after the last micro-batch, and gather once, 2Ψ; stage 2 reduces every micro-batch, (A +
    1)Ψ; stage 3 gathers in forward and backward and reduces, 3AΨ. ``hpz`` moves the backward gather inside the node,
    ``qwz`` makes an element 8 bits, ``qgz`` makes a gradient 4 bits and reduces inside the node first, then between
    nodes (Wang et al. 2023, ZeRO++, arXiv 2306.10209, section 3), plus one float32 scale per block. Padding of units to
    equal shards travels too.
    """
    sizes = unit_sizes(units)
    if setup.world_size == 1:
        return ()
    padded = [setup.shard(size) * setup.world_size for size in sizes]
    count, elements = len(sizes), sum(padded)
    gradient = elements * setup.bytes.gradient
    parameter = elements * setup.bytes.parameter
    passes = setup.accumulation
    if setup.stage < 3:
        reductions = passes if setup.stage == 2 else 1
        averaged = gradient if setup.averaged_bytes is None else elements * setup.averaged_bytes
        second = "all-gather gradients" if setup.stage == 0 else "all-gather updated parameters"
        return (
            Collective("reduce-scatter gradients", reductions * gradient, "all", reductions * count),
            Collective(second, averaged if setup.stage == 0 else parameter, "all", count),
        )
    forward = sum(_quantized_nbytes(size, 8, setup) for size in padded) if setup.qwz else parameter
    backward = parameter if setup.hpz else forward
    again = count if kept is None else count - 1
    if kept is not None:
        stays = padded[kept]
        quantized = setup.qwz and not setup.hpz
        backward -= _quantized_nbytes(stays, 8, setup) if quantized else stays * setup.bytes.parameter
    rows = [Collective("all-gather in forward", passes * forward, "all", passes * count)]
    if again:
        rows.append(
            Collective("all-gather in backward", passes * backward, "node" if setup.hpz else "all", passes * again)
        )
    if setup.qgz:
        coded = passes * sum(_quantized_nbytes(size, 4, setup) for size in padded)
        rows.append(Collective("all-to-all of gradients, inside the node", coded, "node", passes * count))
        rows.append(Collective("all-to-all of gradients, between nodes", coded, "across", passes * count))
    else:
        rows.append(Collective("reduce-scatter gradients", passes * gradient, "all", passes * count))
    return tuple(row for row in rows if _ranks_in(row.group, setup) > 1)


class LinkBytes(NamedTuple):
    """Bytes that one rank sends in a step, and a lower bound on the bytes that leave one node in it."""

    per_rank: int
    across_per_node: int


def link_bytes(rows: Iterable[Collective], setup: Setup) -> LinkBytes:
    """Return the bytes that the collectives ``rows`` of a step send over the links.

    A rank sends volume · (n-1)/n in a group of n ranks, with a ring and with direct messages alike. The bytes that
    leave a node are a lower bound for any algorithm: with k nodes, (k-1)/k of the volume, since each node has to
    receive the rest.
    """
    rank = node = 0
    for row in rows:
        members = _ranks_in(row.group, setup)
        share = row.volume // setup.per_node if row.group == "across" else row.volume
        rank += share * (members - 1) // members
        if row.group != "node":
            node += row.volume * (setup.nodes - 1) // setup.nodes
    return LinkBytes(rank, node)


class TierBytes(NamedTuple):
    """Bytes that one rank moves in a step, between device and host memory and between host memory and drives."""

    device_to_host: int
    host_to_device: int
    disk_read: int
    disk_write: int


def tier_bytes(
    units: int | tuple[int, ...] | list[int], setup: Setup, *, checkpoints: int = 0, checkpoints_on_host: bool = False
) -> TierBytes:
    """Return the bytes that offload moves in one step, for one rank. ``units``: elements of each unit, or of the only
    one.

    Offloaded optimizer: gradients go to the host as often as they are reduced, updated parameters come back once (Ren
    et al. 2021, ZeRO-Offload, arXiv 2101.06840, section 4.1: 2M + 2M bytes), unless parameters are offloaded too.
    Offloaded parameters: the shard goes to the device for forward and for backward of every micro-batch, and to the
    host once updated by an optimizer on the device. On NVMe, master and moments are read and written once per step,
    parameters read twice per micro-batch and written once (Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857,
    section 4.1; its third load, for recomputation, is that of backward). ``checkpoints``: bytes of activation
    checkpoints per micro-batch, which are copied to the host and back with ``checkpoints_on_host``.
    """
    kept, passes = setup.bytes, setup.accumulation
    shard = sum(setup.shard(size) for size in unit_sizes(units))
    down = up = read = write = 0
    if setup.offload_optimizer != "device":
        reductions = passes if setup.stage >= 2 else 1
        down += reductions * shard * kept.gradient
        up += shard * kept.parameter if setup.offload_parameters == "device" else 0
    if setup.offload_optimizer == "nvme":
        read += shard * kept.optimizer
        write += shard * kept.optimizer
    if setup.offload_parameters != "device":
        up += 2 * passes * shard * kept.parameter
        down += shard * kept.parameter if setup.offload_optimizer == "device" else 0
    if setup.offload_parameters == "nvme":
        read += 2 * passes * shard * kept.parameter
        write += shard * kept.parameter
    if checkpoints_on_host:
        down += passes * checkpoints
        up += passes * checkpoints
    return TierBytes(down, up, read, write)


def _quantized_nbytes(elements: int, bits: int, setup: Setup) -> int:
    """Return the bytes of a quantized unit of ``elements`` elements: ``bits`` bits for each, and one float32 scale per
    block.
    """
    return -(-elements * bits // 8) + SCALE_BYTES * -(-elements // setup.codec_block)


def _ranks_in(group: Group, setup: Setup) -> int:
    """Return the number of ranks in one group of the kind ``group``: "all", "node" or "across" (one rank of
    each node).
    """
    return {"all": setup.world_size, "node": setup.per_node, "across": setup.nodes}[group]
