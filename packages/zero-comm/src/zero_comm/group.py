"""Flat collectives on one process group, in the order in which every rank issues them.

Every collective takes a `Tag`, by which the ledger, the flight recorder and errors name it, and returns a `Work`, whose
`wait` finishes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .errors import CommError, PeerError
from .flight_recorder import Ticket, Track
from .leaving import close_at_exit, destroy_group
from .ledger import Ledger
from .slices import SliceSum, sum_slices
from .tag import Tag
from .topology import ONE_NODE, Topology
from .watched import Watched
from .work import Work

_TAG_LIMIT = 1 << 30  # gloo's message tags are 32-bit signed


class Group:
    """All-gather, reduce-scatter, all-to-all and broadcast over ``process_group``; None stands for a single rank.

    Every rank of the group must issue the same calls in the same order, and wait for each `Work`. Starting one raises
    `PeerError` when a peer is known to be gone, and, with several ranks, `CommError` after `close`. ``topology``: which
    of the group's ranks share a node, for the ledger; by default all do. ``averages``: `reduce_scatter` divides by the
    number of ranks; if False, the owners get the sum. ``slice_sum``: sums slices that arrived. ``deterministic``:
    always sum in rank order, never by a backend's own reduction. ``explain``: replaces an error by one with its cause
    (`Control.explain`). ``watched``: shows to the watch what this rank waits for. The ``ledger`` counts a backend's own
    collective as if every rank sent its slice to each other rank.

    [Note: direct messages on gloo] gloo's own all-gather and reduce-scatter copy through temporaries, and its
    reduce-scatter sends the bytes of an all-reduce. Here each rank sends its slice to every other rank and receives
    theirs in place: the formula's bytes, no copy, no worker thread, 0.37 of the time for 64 MiB at two ranks. On
    accelerators (NCCL and others) the backend's own collectives are used.

    Attributes:
        rank, world_size: this rank's number in the group, and the group's size.
        issued: number of collectives that this rank has started since the process group was opened.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        ledger: Ledger | None = None,
        slice_sum: SliceSum = sum_slices,
        deterministic: bool = False,
        averages: bool = True,
        explain: Callable[[CommError], CommError] | None = None,
        topology: Topology = ONE_NODE,
        watched: Watched | None = None,
    ) -> None:
        self._alone: dist.ProcessGroup | None = None
        self._explain = explain
        self._watched = watched
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.topology = topology
        self._far_peers = topology.far_peers(self.rank)
        self.ledger = ledger if ledger is not None else Ledger()
        self._slice_sum = slice_sum
        self._deterministic = deterministic
        self._divisor = self.world_size if averages else 1
        self.reopen(process_group)

    def reopen(self, process_group: dist.ProcessGroup | None) -> None:
        """Use ``process_group``, a new one of the same ranks (None for a single rank), after `close`, and count
        `issued` from 0. Discard every `Work` of the old one. The constructor calls it, too."""
        self._process_group = process_group
        self._process = os.getpid()
        self._sequence = 0
        self.issued = 0
        if process_group is not None:
            self._cancel_close_at_exit = close_at_exit(self)
        self._track = Track("" if process_group is None else process_group.group_name)

    def drop_unfinished(self) -> None:
        """Do nothing, unlike other kinds of `Reduction`: a reduction here is one collective, without later hops to
        drop."""

    def torch_group(self) -> dist.ProcessGroup:
        """Return torch's process group of these ranks, for the caller's own collectives.

        For a single rank in a larger world the first call makes the group, without the other ranks. In a world of one
        rank it is the default group. Raises ValueError after `close` if the group has several ranks.
        """
        if self._process_group is not None:
            return self._process_group
        if self.world_size > 1:
            raise ValueError("the group is closed: its process group is destroyed")
        if dist.get_world_size() == 1 and dist.group.WORLD is not None:
            return dist.group.WORLD
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return self._alone

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        """Start to fill ``out`` (1-D, N*s elements, contiguous) with the N ranks' ``shard`` (s elements, contiguous,
        same dtype) in rank order.

        ``out`` is complete, and ``shard`` may change, once `Work.wait` has returned. ``shard`` may be this rank's slice
        of ``out``. Sends s*(N-1) elements. Raises ValueError for other sizes.
        """
        size = shard.numel()
        _check_size(
            out.numel() == size * self.world_size, tag, f"out of {size * self.world_size} elements", out.numel()
        )
        mine = out[self.rank * size : (self.rank + 1) * size]
        if not mine.is_set_to(shard):
            mine.copy_(shard)
        if self.world_size == 1 or size == 0:
            return Work(tag)
        self._require_open(tag)
        self._count(tag, shard.nbytes)
        ticket = self._track.start(tag, out.nbytes)
        if self._uses_direct_messages(out):
            return Work(
                tag,
                self._exchange([shard] * self.world_size, self._slices(out, self.world_size), tag),
                buffers=(out, shard),
                explain=self._explain,
                ticket=ticket,
                ledger=self.ledger,
                watched=self._watched,
            )
        work = dist.all_gather_into_tensor(out, mine, group=self._process_group, async_op=True)
        self.issued += 1
        return Work(
            tag,
            [(work, None)],
            buffers=(out, shard),
            explain=self._explain,
            ticket=ticket,
            ledger=self.ledger,
            watched=self._watched,
        )

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """Start to average the N ranks' ``flat`` (N*s elements) and to give slice r to rank r, in its ``out`` (s
        elements).

        Both are 1-D and contiguous. ``out`` is complete, and ``flat`` may change, once `Work.wait` has returned; a
        backend may write ``out`` before. Slices travel in ``flat``'s dtype, are summed in rank order 0…N-1 in ``out``'s
        dtype and divided once by N (not with ``averages=False``); with ``accumulate`` the average is added to ``out``.
        Sends s*(N-1) elements. If both dtypes are equal and the group is not ``deterministic``, an accelerator's
        backend reduces, in its own order. If they differ it is not used: it would either send ``out``'s wider numbers
        or sum in ``flat``'s narrower dtype. Raises ValueError for other sizes.
        """
        size = out.numel()
        _check_size(
            flat.numel() == size * self.world_size, tag, f"flat of {size * self.world_size} elements", flat.numel()
        )
        own = flat[self.rank * size : (self.rank + 1) * size]
        if self.world_size == 1 or size == 0:
            return Work(tag, finish=lambda: self._sum([own], out, accumulate))
        self._require_open(tag)
        self._count(tag, own.nbytes)
        ticket = self._track.start(tag, flat.nbytes)
        if not self._uses_direct_messages(flat) and not self._deterministic and flat.dtype == out.dtype:
            return self._native_reduce_scatter(flat, out, tag, accumulate, ticket)
        received = flat.new_empty(self.world_size - 1, size)
        parts = self._slices(received, self.world_size - 1)
        parts.insert(self.rank, own)
        if self._uses_direct_messages(flat):
            pending = self._exchange(self._slices(flat, self.world_size), parts, tag)
        else:
            whole = torch.empty_like(flat)
            parts = self._slices(whole, self.world_size)
            pending = [(dist.all_to_all_single(whole, flat, group=self._process_group, async_op=True), None)]
            self.issued += 1

        def finish() -> None:
            """Sum the slices that arrived into ``out``, in rank order; `Work.wait` calls it."""
            self._sum(parts, out, accumulate)

        buffers = (flat, received, out)
        return Work(
            tag,
            pending,
            buffers=buffers,
            finish=finish,
            explain=self._explain,
            ticket=ticket,
            ledger=self.ledger,
            watched=self._watched,
        )

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor, tag: Tag) -> Work:
        """Start to send slice r of ``flat`` to rank r, and to receive rank r's slice for this rank in slice r of
        ``out``.

        Both are contiguous, of one dtype and N*s elements (for N ranks), in any shape. ``out`` is complete, and
        ``flat`` may change, once `Work.wait` has returned. Sends s*(N-1) elements. Raises ValueError for other sizes.
        """
        size = flat.numel() // self.world_size
        _check_size(
            flat.numel() == size * self.world_size, tag, f"flat of {size * self.world_size} elements", flat.numel()
        )
        _check_size(out.numel() == flat.numel(), tag, f"out of {flat.numel()} elements", out.numel())
        if self.world_size == 1 or size == 0:
            out.copy_(flat)
            return Work(tag)
        self._require_open(tag)
        self._count(tag, size * flat.element_size())
        ticket = self._track.start(tag, flat.nbytes)
        if self._uses_direct_messages(flat):
            send, receive = self._slices(flat, self.world_size), self._slices(out, self.world_size)
            receive[self.rank].copy_(send[self.rank])
            pending = self._exchange(send, receive, tag)
        else:
            work = dist.all_to_all_single(out.view(-1), flat.view(-1), group=self._process_group, async_op=True)
            pending = [(work, None)]
            self.issued += 1
        return Work(
            tag,
            pending,
            buffers=(out, flat),
            explain=self._explain,
            ticket=ticket,
            ledger=self.ledger,
            watched=self._watched,
        )

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> Work:
        """Start to copy the ``tensor`` of this group's rank ``source`` into every rank's ``tensor``; it is complete
        once `Work.wait` has returned.

        ``tensor``: contiguous, of any shape and dtype, the same on all ranks. It travels as bytes, as no backend has
        every dtype that a buffer may have.
        """
        if self.world_size == 1 or tensor.numel() == 0:
            return Work(tag)
        self._require_open(tag)
        sent = tensor.nbytes if self.rank == source else 0
        self.ledger.count(tag, sent, sent if self._far_peers else 0)
        ticket = self._track.start(tag, tensor.nbytes)
        data = tensor.detach().view(-1).view(torch.uint8)
        work = dist.broadcast(data, group=self._process_group, async_op=True, group_src=source)
        self.issued += 1
        return Work(
            tag,
            [(work, None)],
            buffers=(tensor,),
            explain=self._explain,
            ticket=ticket,
            ledger=self.ledger,
            watched=self._watched,
        )

    def show_waits(self, watched: Watched, explain: Callable[[CommError], CommError]) -> None:
        """Show in ``watched``, from now on, what this rank waits for in this group, and have ``explain`` replace
        errors."""
        self._watched, self._explain = watched, explain

    def close(self) -> None:
        """Destroy the process group, and the one that `torch_group` made, without waiting for other ranks; peers that
        still wait in it get an error. With several ranks only `reopen` may follow. Does nothing if it was called
        before."""
        if self._process_group is not None:
            self._cancel_close_at_exit()
            destroy_group(self._process_group, self._process)
            self._process_group = None
        if self._alone is not None:
            destroy_group(self._alone, self._process)
            self._alone = None

    def coded_ranks(self, device: torch.device) -> Sequence[int]:
        """Return the ranks whose slices on ``device`` a collective with a `Codec` encodes and decodes: all. A group in
        a fake world has fewer."""
        return range(self.world_size)

    def _require_open(self, tag: Tag) -> None:
        """Raise `CommError`, which names ``tag``, if `close` was called: torch would take the default group for None.
        Call it for several ranks only."""
        if self._process_group is None:
            raise CommError(f"{tag}: the group of rank {self.rank} of {self.world_size} is closed")

    def _count(self, tag: Tag, slice_bytes: int) -> None:
        """Count in the ledger the collective ``tag``, in which this rank sends ``slice_bytes`` bytes to every other
        rank; separately, the bytes that go to other nodes. `issued` does not change."""
        self.ledger.count(tag, (self.world_size - 1) * slice_bytes, self._far_peers * slice_bytes)

    def _uses_direct_messages(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on the CPU, so that its collectives are messages between pairs of ranks ([Note:
        direct messages on gloo]); else the backend's own collectives are used."""
        return tensor.device.type == "cpu"

    def _slices(self, flat: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the ``count`` slices of equal length of the contiguous ``flat``, as 1-D views."""
        return list(flat.view(count, -1).unbind())

    def _sum(self, slices: Sequence[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
        """Sum ``slices``, one of each rank, divide by the number of ranks (not with ``averages=False``), and write the
        result to ``out``, or with ``accumulate`` add it there."""
        self._slice_sum(slices, out, divisor=self._divisor, accumulate=accumulate)

    def _exchange(
        self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], tag: Tag
    ) -> list[tuple[Any, int | None]]:
        """Start to send ``send[r]`` to and receive ``receive[r]`` from every other rank r, nearest neighbours first.

        Return the pending operations for `Work`: (torch's handle, peer rank); none for a single rank. Entries of this
        rank itself are ignored. Counts one in `issued`. Raises PeerError, which names ``tag``, when a peer is known to
        be gone.
        """
        self._sequence = (self._sequence + 1) % _TAG_LIMIT
        pending: list[tuple[Any, int | None]] = []
        for distance in range(1, self.world_size):
            source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            try:
                arrival = dist.irecv(receive[source], group=self._process_group, group_src=source, tag=self._sequence)
                departure = dist.isend(send[target], group=self._process_group, group_dst=target, tag=self._sequence)
            except RuntimeError as error:  # the connection is known to be gone already
                failure = PeerError(f"{tag}: rank {source} or {target} left before it: {error}")
                raise (failure if self._explain is None else self._explain(failure)) from error
            pending += [(arrival, source), (departure, target)]
        self.issued += 1
        return pending

    def _native_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, accumulate: bool, ticket: Ticket | None
    ) -> Work:
        """Start a `reduce_scatter` by the backend's own collective, for an accelerator's ``flat`` and ``out`` of equal
        dtypes. The arguments are those of `reduce_scatter`; ``ticket``: the collective's entry in the flight recorder,
        None without one."""
        result = torch.empty_like(out) if accumulate else out
        work = dist.reduce_scatter_tensor(result, flat, group=self._process_group, async_op=True)
        self.issued += 1

        def finish() -> None:
            """Divide the ranks' sum by the number of ranks (not with ``averages=False``) and, with ``accumulate``, add
            it to ``out``; without, it is in ``out`` already."""
            result.div_(self._divisor)
            if accumulate:
                out.add_(result)

        buffers = (flat, result, out)
        return Work(
            tag,
            [(work, None)],
            buffers=buffers,
            finish=finish,
            explain=self._explain,
            ticket=ticket,
            ledger=self.ledger,
            watched=self._watched,
        )


def _check_size(fits: bool, tag: Tag, expected: str, got: int) -> None:
    """Raise ValueError unless ``fits``. ``expected``: what was expected, in words; ``got``: the number of elements that
    the caller passed.
    """
    if not fits:
        raise ValueError(
            f"{tag}: expected {expected}, got {got} elements; pad the flat buffer to a multiple of the world size"
        )
