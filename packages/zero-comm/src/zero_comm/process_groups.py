"""The process groups of one engine: gather, reduce, control, and those between replicas.

The data groups are those whose collectives carry tensors: all but control. The watch is a thread of each rank that ends
waits that would never end; see [Note: the watch] in watch.py. A row is the list of global ranks of one engine, or of
one of its groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .alike import AlikeControl, AlikeGroup, in_fake_world
from .connections import Connections
from .control import Control
from .group import Group
from .ledger import Ledger
from .message import Message
from .packets import Codec
from .quantized import QuantizedGather, QuantizedReduce
from .replicated import Reduction, ReplicatedReduce
from .slices import SliceSum, sum_slices
from .stacks import describe_failure
from .starting import starting_together
from .tag import Tag
from .topology import node_name

Rows = Sequence[Sequence[int]]
"""The global ranks of each group of one kind; each rank of the world is in exactly one row."""


@dataclass(frozen=True)
class _Opening:
    """The arguments of `EngineGroups.open` that `EngineGroups.reopen` needs, under the same names."""

    rows: Rows = ()
    ranks_per_node: int | None = None
    stopped_after: float = 60.0
    for_cpu: bool = False


@dataclass(frozen=True)
class EngineGroups:
    """The process groups of one engine: gathers, reductions and control messages never wait for one another.

    ``gather``: the ranks that shard this rank's replica of the model. ``reduce``: averages over all ranks, into that
    replica's shards. ``control``: all ranks. ``replicate``: the ranks that hold this rank's shard in each replica.
    ``secondary``: the subset of ``gather``'s ranks, inside a node, over which a secondary copy of the weights is
    sharded (ZeRO++ hpZ); None without one. Made by `open`.
    """

    gather: Group
    reduce: Reduction
    control: Control
    replicate: Group = field(default_factory=lambda: Group(None))
    secondary: Group | None = None
    _data: tuple[tuple[Group, Rows], ...] = ()
    _connections: Connections = field(default_factory=Connections)
    _opening: _Opening = _Opening()

    @classmethod
    def open(
        cls,
        rows: Rows,
        *,
        ledger: Ledger | None = None,
        slice_sum: SliceSum = sum_slices,
        deterministic: bool = False,
        averages: bool = True,
        ranks_per_node: int | None = None,
        shard_size: int | None = None,
        secondary_size: int = 1,
        gradient_codec: Codec | None = None,
        average_codec: Codec | None = None,
        check: Callable[[Control], None] | None = None,
        stopped_after: float = 60.0,
        for_cpu: bool = False,
    ) -> EngineGroups:
        """Open the groups of one engine for each of ``rows``, start the watch, and return the groups of this rank's
        row; `close` ends both. Collective over the world, with the same arguments on every rank.

        ``slice_sum``, ``deterministic``, ``averages``: see `Group`. ``ranks_per_node``: see `node_name`.
        ``shard_size``: number of consecutive ranks of a row that shard one replica of the model (default: the whole
        row, so one replica). ``secondary_size``: ranks of a secondary group, 1 for none. ``gradient_codec``: quantizes
        the reduction, which then runs inside nodes first (where blocks of consecutive ranks share one), then across
        nodes, then between replicas. ``average_codec``: quantizes the averages that come back from other replicas
        (default: ``gradient_codec``). ``check``: called once the ranks of a row can exchange messages and before
        anything that depends on the arguments is made, to compare the arguments. ``stopped_after``: seconds without a
        heartbeat after which a rank that others wait for counts as gone. ``for_cpu``: tensors on the CPU are sent too,
        by gloo where the default process group has no backend for them. Raises ValueError when a size does not divide a
        row, `PeerError` when a rank does not answer, and what ``check``, or torch in making groups, raises.
        """
        shards = rows if shard_size is None else _blocks(rows, "shard_size", shard_size)
        secondary_rows = _blocks(rows, "secondary_size", secondary_size)
        book = ledger if ledger is not None else Ledger()
        connections = Connections()
        with connections.recording():
            control = open_control(rows, ledger=book, ranks_per_node=ranks_per_node)
        control.exchange_nodes(node_name(dist.get_rank(), ranks_per_node))
        if check is not None:
            check(control)
        control.watch(connections.sever, stopped_after)
        opened: list[tuple[Group, Rows]] = []
        kind = AlikeGroup if in_fake_world() else Group

        def data_group(over: Rows) -> Group:
            """Open a data group for each row of ``over``, append this rank's group and ``over`` to ``opened``, and
            return the group. Collective."""
            mine = next(row for row in rows if dist.get_rank() in row)
            ranks = [mine.index(rank) for rank in next(row for row in over if dist.get_rank() in row)]
            with connections.recording():
                process_group = open_group(over, backends_with_cpu() if for_cpu else None)
            group = kind(
                process_group,
                ledger=book,
                slice_sum=slice_sum,
                deterministic=deterministic,
                averages=averages,
                explain=control.explain,
                topology=control.topology.subset(ranks),
                watched=control.watched,
            )
            opened.append((group, over))
            return group

        gather, replicate = data_group(shards), Group(None, ledger=book)
        secondary = data_group(secondary_rows) if secondary_size > 1 else None
        reduction: Reduction
        if gradient_codec is None:
            reduction = data_group(shards)
        else:
            block = math.gcd(_common_block_size(rows, control), len(shards[0]))
            inside, across = data_group(_blocks(shards, "node", block)), data_group(_columns(shards, block))
            reduction = QuantizedReduce(inside, across, gradient_codec)
        if len(shards) > len(rows):
            replicas = _columns(rows, len(shards[0]))
            replicate, others = data_group(replicas), data_group(replicas)
            reduction = _over_replicas(reduction, others, replicate, gradient_codec, average_codec or gradient_codec)
        opening = _Opening(rows, ranks_per_node, stopped_after, for_cpu)
        return cls(gather, reduction, control, replicate, secondary, tuple(opened), connections, opening)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        """Copy the ``tensor`` (contiguous) of `control`'s rank ``source`` into every rank's ``tensor``, across the
        replicas first; waits. Collective over all ranks.

        Raises `PeerError` when a rank is gone.
        """
        replica, number = divmod(source, self.gather.world_size)
        if self.gather.rank == number:
            self.replicate.broadcast(tensor, replica, tag).wait()
        self.gather.broadcast(tensor, number, tag).wait()

    def cover(self, groups: Iterable[Group | Control], connections: Connections) -> None:
        """Have the engine's watch cover ``groups``, which others have opened, and their ``connections``. Their ranks
        are those of the engine.

        A wait in them counts as one of the engine's, the engine's ledger counts what they send, their errors name the
        cause that a rank has reported, and `abort` cuts their connections, which `reopen` does not open again.
        """
        for group in groups:
            group.ledger = self.control.ledger
            group.show_waits(self.control.watched, self.control.explain)
        self._connections.include(connections)

    def abort(self, failure: BaseException, *, when: str = "") -> None:
        """Destroy all groups because this rank cannot continue after ``failure``, and cut their connections, so that no
        rank waits for it. Waits for the store, where the cause is kept, but for no other rank.

        The others' errors name ``failure`` and ``when`` (in words, as "in step 3"), unless a rank has reported a cause
        before. Only `meet_again` and `reopen` may follow.
        """
        self.control.report_failure(describe_failure(failure, when))
        self._connections.sever()
        self.close()

    @property
    def can_reopen(self) -> bool:
        """Return whether `reopen` is possible after `abort`: whether one row holds all ranks of the job."""
        return len(self._opening.rows) == 1

    def meet_again(self, call: str, payload: Any) -> list[Any]:
        """Wait, after `abort`, until all ranks have called this, and return every rank's ``payload`` (JSON data) in
        rank order.

        `reopen` follows. ``call`` names the user's call in errors. Raises `PeerError` on every rank when one has not
        called this ``stopped_after`` seconds (see `open`) after another.
        """
        return self.control.meet_again(call, payload, self._opening.stopped_after)

    def reopen(self) -> None:
        """Open new process groups for these same `Group` and `Control` objects, right after `meet_again`, and start the
        watch again. Collective; only if `can_reopen`.

        Reductions that the failure interrupted are dropped; every `Work` of the old groups is of no more use. Raises
        `PeerError` when a rank fails in it.
        """
        opening = self._opening
        with starting_together("a new start after a failure"):
            with self._connections.recording():
                self.control.reopen(open_group(opening.rows, "gloo"))
            self.control.exchange_nodes(node_name(dist.get_rank(), opening.ranks_per_node))
            self.control.watch(self._connections.sever, opening.stopped_after)
            for group, rows in self._data:
                with self._connections.recording():
                    group.reopen(open_group(rows, backends_with_cpu() if opening.for_cpu else None))
        self.reduce.drop_unfinished()

    def issued(self) -> list[int]:
        """Return the number of collectives that this rank has started on each of its data groups since they were
        opened, in a fixed order, so that ranks can be compared."""
        return [group.issued for group, _ in self._data]

    def close(self) -> None:
        """Stop the watch and destroy all process groups, without waiting for other ranks; peers that still wait in them
        get an error. Does nothing if it was called before."""
        self.control.end_watch()
        for group, _ in self._data:
            group.close()
        self.control.close()


def open_group(rows: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Make a process group for each of ``rows`` and return this rank's; None if its row is this rank alone.

    Collective over the world, with the same rows on every rank. ``backend``: as for `torch.distributed.new_group`; in
    a fake world every group is fake (see [Note: a fake world]).
    """
    mine, rank = None, dist.get_rank()
    if in_fake_world():
        backend = None
    for row in rows:
        if len(row) > 1:
            group = dist.new_group(list(row), backend=backend)
            if rank in row:
                mine = group
    return mine


def backends_with_cpu() -> str | None:
    """Return the ``backend`` for `open_group` with gloo for the CPU beside the default process group's backends; None,
    which means the default group's own, if it has one for the CPU."""
    backends = dist.get_backend_config()
    return None if "cpu:" in backends else f"cpu:gloo,{backends}"


def open_control(
    rows: Sequence[Sequence[int]], *, ledger: Ledger | None = None, ranks_per_node: int | None = None
) -> Control:
    """Open and return the control group of this rank's row of ``rows``, an `AlikeControl` in a fake world. Collective
    over the world, with the same ``rows`` on every rank.

    ``ledger``: counts the group's messages. ``ranks_per_node``: see `node_name`; used only in a fake world.
    """
    group = open_group(rows, "gloo")
    if not in_fake_world():
        return Control(group, ledger=ledger)
    mine = next(row for row in rows if dist.get_rank() in row)
    nodes = [node_name(rank, ranks_per_node, {}) for rank in mine]
    return AlikeControl(group, ledger=ledger, nodes=nodes)


def _over_replicas(
    replica: Reduction, across: Group, back: Group, gradient_codec: Codec | None, average_codec: Codec | None
) -> ReplicatedReduce:
    """Return the reduction over all replicas of the model, quantized if there are codecs. ``replica``: the reduction
    over the ranks of this rank's replica.

    ``across``, ``back``: groups of the ranks with this rank's shard; see `ReplicatedReduce`. ``gradient_codec``: of the
    gradients that go to other replicas; ``average_codec``: of the averages that come back; without either nothing is
    quantized.
    """
    if gradient_codec is None or average_codec is None:
        return ReplicatedReduce(replica, across, back, ledger=across.ledger)
    each_alone = QuantizedReduce(Group(None), across, gradient_codec)
    last = QuantizedGather(back, average_codec)
    return ReplicatedReduce(replica, each_alone, last, rounds=False, ledger=across.ledger)


def _common_block_size(rows: Rows, control: Control) -> int:
    """Return the largest size, common to all ``rows``, such that every row divides into blocks of so many consecutive
    ranks that each lie inside one node. Collective over the world. ``control``: of this rank's row.

    All rows need the same size, as every rank takes part in making all groups.
    """
    block = control.topology.block_size(control.world_size)
    if len(rows) == 1:
        return block
    everybody = open_control([[rank for row in rows for rank in row]])
    try:
        return math.gcd(*everybody.agree(Message("blocks", "", 0, block)))
    finally:
        everybody.close()


def _blocks(rows: Rows, what: str, size: int) -> list[Sequence[int]]:
    """Return the blocks of ``size`` consecutive ranks into which ``rows`` divide, in order. Raises ValueError, which
    names the size by ``what``, if the size does not divide a row."""
    for row in rows:
        if size < 1 or len(row) % size:
            possible = [n for n in range(1, len(row) + 1) if len(row) % n == 0]
            raise ValueError(f"{what} must divide the world size {len(row)}, got {size}; possible sizes: {possible}")
    return [row[start : start + size] for row in rows for start in range(0, len(row), size)]


def _columns(rows: Rows, size: int) -> list[Sequence[int]]:
    """Return the columns of the rows, each row written as blocks of ``size`` consecutive ranks below one another: for
    each row and each index below ``size``, the ranks with this index in the row's blocks."""
    return [row[place::size] for row in rows for place in range(size)]
