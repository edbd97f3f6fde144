"""The process groups of one engine, and what travels on which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .alike import AlikeControl, in_fake_world
from .connections import Connections
from .control import Control, Message
from .group import Group
from .ledger import Ledger
from .packets import Codec
from .quantized import QuantizedGather, QuantizedReduce
from .replicated import Reduction, ReplicatedReduce
from .slices import SliceSum, sum_slices
from .starting import starting_together
from .tag import Tag
from .topology import node_name

Rows = Sequence[Sequence[int]]
"""Global ranks of every group of one kind; each rank of the world is in one row."""


@dataclass(frozen=True)
class _Opening:
    """With what groups were opened; see `EngineGroups.open`."""

    rows: Rows = ()
    ranks_per_node: int | None = None
    stopped_after: float = 60.0


@dataclass(frozen=True)
class EngineGroups:
    """The process groups of one engine: gathers, reductions and control messages never wait for one another.

    ``gather``: the ranks that have one copy of the model between them. ``reduce``: averages over all ranks into that
    copy's shards. ``control``: all ranks. ``replicate``: the ranks that have this rank's shard in the other copies.
    ``secondary``: a part of ``gather``'s ranks, inside a node, that can have all weights between them; None without.
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
    ) -> EngineGroups:
        """The groups of an engine over each of ``rows``; returns those of this rank's row. Every rank of the world must
        call it together, with the same arguments.

        ``averages``: see `Group`. ``ranks_per_node``: see `node_name`.
        ``shard_size``: so many consecutive ranks of a row have one copy of the
        model between them, and the others repeat it (default: the whole row). ``secondary_size``: ranks of a
        secondary group, 1 for none. ``gradient_codec``: reductions travel through it, inside nodes first where blocks
        of consecutive ranks lie in one, then across, then to other copies of the model, whose averages come back
        through ``average_codec`` (default: the same). ``check``: called when the ranks of a row can talk and nothing
        that depends on the arguments is made yet, to make sure that they are the same. ``stopped_after``: seconds
        without a sign of life after which a rank that others wait for counts as gone. Raises ValueError when a size
        does not divide a row.
        """
        shards = rows if shard_size is None else _blocks(rows, "shard_size", shard_size)
        parts = _blocks(rows, "secondary_size", secondary_size)
        book = ledger if ledger is not None else Ledger()
        connections = Connections()
        with connections.recording():
            control = open_control(rows, ledger=book, ranks_per_node=ranks_per_node)
        control.place(node_name(dist.get_rank(), ranks_per_node))
        if check is not None:
            check(control)
        control.watch(connections.sever, stopped_after)
        opened: list[tuple[Group, Rows]] = []

        def data_group(over: Rows) -> Group:
            mine = next(row for row in rows if dist.get_rank() in row)
            ranks = [mine.index(rank) for rank in next(row for row in over if dist.get_rank() in row)]
            with connections.recording():
                process_group = open_group(over)
            group = Group(
                process_group,
                ledger=book,
                slice_sum=slice_sum,
                deterministic=deterministic,
                averages=averages,
                explain=control.explain,
                topology=control.topology.of(ranks),
                watched=control.watched,
            )
            opened.append((group, over))
            return group

        gather, replicate = data_group(shards), Group(None, ledger=book)
        secondary = data_group(parts) if secondary_size > 1 else None
        reduction: Reduction
        if gradient_codec is None:
            reduction = data_group(shards)
        else:
            block = math.gcd(_common_block(rows, control), len(shards[0]))
            inside, across = data_group(_blocks(shards, "node", block)), data_group(_columns(shards, block))
            reduction = QuantizedReduce(inside, across, gradient_codec)
        if len(shards) > len(rows):
            copies = _columns(rows, len(shards[0]))
            replicate, others = data_group(copies), data_group(copies)
            reduction = _over_copies(reduction, others, replicate, gradient_codec, average_codec or gradient_codec)
        opening = _Opening(rows, ranks_per_node, stopped_after)
        return cls(gather, reduction, control, replicate, secondary, tuple(opened), connections, opening)

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        """Copy ``tensor`` (contiguous) of rank ``source`` of ``control`` to every rank of it."""
        copy, number = divmod(source, self.gather.world_size)
        if self.gather.rank == number:
            self.replicate.broadcast(tensor, copy, tag).wait()
        self.gather.broadcast(tensor, number, tag).wait()

    def abort(self, failure: BaseException, *, when: str = "") -> None:
        """This rank cannot go on: give all groups back, so that nobody waits for it.

        The others learn ``failure`` and ``when``, unless a rank has told a cause before.
        """
        self.control.tell(f"{type(failure).__name__}: {failure}{when}")
        self._connections.sever()
        self.close()

    @property
    def can_reopen(self) -> bool:
        """Return whether `reopen` can follow `abort`: these groups' ranks are all of the job."""
        return len(self._opening.rows) == 1

    def meet_again(self, call: str, payload: Any) -> list[Any]:
        """After `abort`, before `reopen`: return every rank's ``payload`` (plain data) in rank order.

        Raises `PeerError` on every rank when one has not made a call (named ``call`` here) that comes here within
        ``stopped_after`` of another.
        """
        return self.control.meet_again(call, payload, self._opening.stopped_after)

    def reopen(self) -> None:
        """Make the process groups anew, for the same objects; right after `meet_again`, on every rank."""
        opening = self._opening
        with starting_together("a new start after a failure"):
            with self._connections.recording():
                self.control.reopen(open_group(opening.rows, "gloo"))
            self.control.place(node_name(dist.get_rank(), opening.ranks_per_node))
            self.control.watch(self._connections.sever, opening.stopped_after)
            for group, rows in self._data:
                with self._connections.recording():
                    group.reopen(open_group(rows))
        self.reduce.drop_open()

    def issued(self) -> list[int]:
        """How many collectives this rank has started on each of its data groups."""
        return [group.issued for group, _ in self._data]

    def close(self) -> None:
        """Give all process groups back."""
        self.control.end_watch()
        for group, _ in self._data:
            group.close()
        self.control.close()


def open_group(rows: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Make a process group of each of ``rows`` and return this rank's; None where its row is this rank alone.

    Every rank of the world must call it together, with the same rows. ``backend``: see torch; in a fake world every
    group is fake (see [Note: a fake world]).
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


def open_control(
    rows: Sequence[Sequence[int]], *, ledger: Ledger | None = None, ranks_per_node: int | None = None
) -> Control:
    """Return what this rank's row of ``rows`` exchanges messages over. Every rank of the world must call it together.

    ``ranks_per_node``: see `node_name`; only asked where the world is fake.
    """
    group = open_group(rows, "gloo")
    if not in_fake_world():
        return Control(group, ledger=ledger)
    mine = next(row for row in rows if dist.get_rank() in row)
    nodes = [node_name(rank, ranks_per_node, {}) for rank in mine]
    return AlikeControl(group, ledger=ledger, nodes=nodes)


def _over_copies(
    copy: Reduction, across: Group, back: Group, gradient_codec: Codec | None, average_codec: Codec | None
) -> ReplicatedReduce:
    """``copy``'s averages, averaged over the copies of the model, through the codecs where there are some."""
    if gradient_codec is None or average_codec is None:
        return ReplicatedReduce(copy, across, back)
    each_alone = QuantizedReduce(Group(None), across, gradient_codec)
    return ReplicatedReduce(copy, each_alone, QuantizedGather(back, average_codec), rounds=False)


def _common_block(rows: Rows, control: Control) -> int:
    """The largest block of consecutive ranks that lies inside one node in every row: groups are made over all rows."""
    block = control.topology.block(control.world_size)
    if len(rows) == 1:
        return block
    everybody = open_control([[rank for row in rows for rank in row]])
    try:
        return math.gcd(*everybody.agree(Message("blocks", "", 0, block)))
    finally:
        everybody.close()


def _blocks(rows: Rows, what: str, size: int) -> list[Sequence[int]]:
    """Every row in blocks of ``size`` consecutive ranks."""
    for row in rows:
        if size < 1 or len(row) % size:
            possible = [n for n in range(1, len(row) + 1) if len(row) % n == 0]
            raise ValueError(f"{what} must divide the world size {len(row)}, got {size}; possible sizes: {possible}")
    return [row[start : start + size] for row in rows for start in range(0, len(row), size)]


def _columns(rows: Rows, size: int) -> list[Sequence[int]]:
    """The ranks that have the same place in every row's blocks of ``size``."""
    return [row[place::size] for row in rows for place in range(size)]
