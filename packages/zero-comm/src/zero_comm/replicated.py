"""The reduction over several replicas of the sharded model (MiCS, HSDP).

A reduction in several hops consists of several collectives, one after the other, each over some of the ranks. The
owners of a slice are the ranks that hold it as their shard. A ``tag`` names a collective in the ledger and in errors.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

from .hop_streams import HopStreams
from .ledger import Ledger
from .tag import Tag
from .work import Work


class Reduction(Protocol):
    """Averages flat buffers into the owners' slices: `Group`, or a reduction in several hops, each a collective over
    some of the ranks."""

    @property
    def rank(self) -> int:
        """Return the number of the slice that this rank owns."""

    @property
    def world_size(self) -> int:
        """Return the number of slices."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """Start to average the ranks' ``flat`` and to write slice r of the average into its owners' ``out``, or with
        ``accumulate`` to add it there; see `Group.reduce_scatter`. ``tag`` names the reduction."""

    def drop_unfinished(self) -> None:
        """Forget reductions whose last hop has not started. Called when a failure has ended the process groups and new
        ones are open: the next reduction must not continue the old ones. Their `Work` must not be waited for
        afterwards."""


class Gather(Protocol):
    """Fills a flat buffer with the ranks' slices: `Group` or `QuantizedGather`."""

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        """Start to fill ``out`` with the ranks' ``shard`` in rank order; see `Group.all_gather`. ``tag`` names the
        gather."""


class ReplicatedReduce:
    """`Group.reduce_scatter` over all replicas of the model: inside each replica's ranks, then across the replicas.

    ``shard``: over the S ranks of a replica. ``across`` and ``back``: over the R ranks that hold the same shard, on two
    separate groups. ``rounds``: whether numbers are cast to ``flat``'s dtype before they go to other replicas; False
    where ``across`` and ``back`` have codecs. ``ledger``: gets the seconds of reductions on an accelerator, each
    as a whole.

    [Note: order of the averages] The first average runs over a replica's ranks, in rank order 0…S-1; the second runs
    over these R averages, in the order of the replicas. The averages in between are no larger than gradients, so they
    fit the dtype in which gradients travel. Every rank, the owner too, takes the final average in the form in which it
    travels, so all replicas end with the same bits.

    On an accelerator the hops run in streams of their own, see [Note: streams of the hops] in hop_streams.py.

    Attributes:
        rank, world_size: those of ``shard``; they say who owns which slice.
    """

    def __init__(
        self,
        shard: Reduction,
        across: Reduction,
        back: Gather,
        *,
        rounds: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        self._shard = shard
        self._across = across
        self._back = back
        self._rounds = rounds
        self.rank = shard.rank
        self.world_size = shard.world_size
        self._ledger = ledger if ledger is not None else Ledger()
        self._open: deque[_ReplicatedReduction] = deque()
        self._streams = HopStreams(self._ledger)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """Start to average ``flat`` (S*s elements) of all ranks, S in each of R replicas, and to give slice r to its R
        owners, in their ``out`` (s elements).

        `Work.wait` writes ``out``. With ``accumulate`` the average is added to ``out``; sums run in ``out``'s dtype.
        Sends (S-1)*s elements of ``flat``'s dtype inside the replica, then 2*(R-1)/R*s of the same dtype (s rounded up
        to a multiple of R) across the replicas; packets instead where there are codecs. On the CPU the hops between
        replicas run in `Work.advance` or `Work.wait`, as in `QuantizedReduce.reduce_scatter`. Every rank must start its
        reductions, and wait for them, in the same order. Raises ValueError for sizes that ``shard`` refuses.
        """
        replicas = self._across.world_size
        partial = out.new_zeros(-(-out.numel() // replicas) * replicas)
        wire = flat.dtype if self._rounds else out.dtype

        def begin() -> _ReplicatedReduction:
            """Start the hop inside the replica, and return the reduction that is now in flight."""
            first = self._shard.reduce_scatter(flat, partial[: out.numel()], tag)
            return _ReplicatedReduction(first, partial, wire, tag, out, accumulate)

        if flat.device.type != "cpu":
            end = self._streams.run(flat.device, lambda: _wait_for_hop(begin()), self._finish_across)
            return Work(tag, [(end, None)], buffers=(flat, out, partial), ledger=self._ledger)
        reduction = begin()
        self._open.append(reduction)

        def finish() -> None:
            """Run the hops that have not run, and write the average into ``out``, or with ``accumulate`` add it there;
            `Work.wait` calls it."""
            self._advance(reduction)
            reduction.finish()

        return Work(tag, buffers=(flat, out), finish=finish, advance=lambda: self._advance(reduction))

    def drop_unfinished(self) -> None:
        """Forget the reductions that have not reached their last hop, and those of the reductions inside and across the
        replicas, too. See `Reduction.drop_unfinished`."""
        self._open.clear()
        self._shard.drop_unfinished()
        self._across.drop_unfinished()

    def _finish_across(self, reduction: _ReplicatedReduction) -> None:
        """Queue the hops of ``reduction`` between the replicas, and the writing of its average, in the current stream;
        for an accelerator, where waits only order streams."""
        self._average_across(reduction)
        reduction.finish()

    def _advance(self, until: _ReplicatedReduction) -> None:
        """Start the last hop of the reductions in flight that have not reached it, in order, up to and including
        ``until``; do nothing if ``until`` has. Waits for the hops before."""
        while until in self._open:
            self._average_across(self._open.popleft())

    def _average_across(self, reduction: _ReplicatedReduction) -> None:
        """Average the slice of ``reduction`` over the replicas: wait for its hop inside the replica, reduce-scatter the
        slice across the replicas, wait, and start to all-gather the averages, its last hop. Collective over the ranks
        with this shard."""
        reduction.last.wait()
        own = reduction.buffer.new_empty(reduction.buffer.numel() // self._across.world_size)
        reduction.buffer = full = reduction.buffer.to(reduction.wire)
        self._across.reduce_scatter(full, own, reduction.tag).wait()
        reduction.last = self._back.all_gather(full, own.to(reduction.wire), reduction.tag)


class _ReplicatedReduction:
    """One reduction in flight.

    ``first``: the hop inside the replica. ``last``: the running hop, which fills ``buffer`` (this rank's slice, padded
    to a multiple of the replicas). ``wire``: the dtype in which ``buffer`` goes to other replicas. ``out``: gets the
    average, which is added to it with ``accumulate``.
    """

    def __init__(
        self, first: Work, buffer: torch.Tensor, wire: torch.dtype, tag: Tag, out: torch.Tensor, accumulate: bool
    ) -> None:
        self.last = first
        self.buffer = buffer
        self.wire = wire
        self.tag = tag
        self._out = out
        self._accumulate = accumulate

    def finish(self) -> None:
        """Wait for the running hop, which must be the last, and write the average into ``out``, or with ``accumulate``
        add it there."""
        self.last.wait()
        average = self.buffer[: self._out.numel()]
        if self._accumulate:
            self._out.add_(average)
        else:
            self._out.copy_(average)


def _wait_for_hop(reduction: _ReplicatedReduction) -> _ReplicatedReduction:
    """Wait for the hop of ``reduction`` that runs, and return ``reduction``."""
    reduction.last.wait()
    return reduction
