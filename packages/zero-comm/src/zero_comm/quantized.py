"""The all-gather and the reduce-scatter of `Group` with fewer bytes on the wire: a `Codec` on every message. A ``tag``
names a collective in the ledger and in errors.

[Note: what is quantised] Both follow ZeRO++ (arXiv 2306.10209): qwZ is `QuantizedGather`, qgZ `QuantizedReduce`. In a
gather every rank decodes every slice, its own too, so all ranks end with the same bits. In the reduction a rank does
not encode its own contribution, which enters the sums exactly, so a single rank loses nothing. The error of an averaged
element is therefore at most the sum of the codec's error bounds over the messages that carried its terms, divided by
the world size: with G nodes of L ranks these are (L - 1) G messages of gradients and G - 1 of partial sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from .group import Group
from .hop_streams import HopStreams
from .packets import Codec, Packets
from .tag import Tag
from .work import Work


class QuantizedGather:
    """`Group.all_gather` over ``group`` with every slice encoded by ``codec``.

    Attributes:
        rank: this rank's number in ``group``.
        world_size: ranks of ``group``.
    """

    def __init__(self, group: Group, codec: Codec) -> None:
        self._group = group
        self._codec = codec
        self.rank = group.rank
        self.world_size = group.world_size

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        """Start to fill ``out`` (N*s elements, floating, contiguous) with the N ranks' ``shard`` (s elements,
        floating), encoded and decoded, in rank order.

        ``shard`` may be this rank's slice of ``out`` and is read before this returns; `Work.wait` writes ``out``. The
        bits are the same on every rank, and also those of a single rank are decoded ones. Sends N-1 packets of s
        elements. Raises ValueError for other sizes.
        """
        size = shard.numel()
        if out.numel() != size * self.world_size:
            raise ValueError(f"{tag}: expected out of {size * self.world_size} elements, got {out.numel()}")
        if size == 0:
            return Work(tag)
        packets = Packets(self._codec, size)
        arrived = packets.empty(self.world_size, out.device)
        packets.write(shard, arrived[self.rank])
        sent = self._group.all_gather(arrived.view(-1), arrived[self.rank], tag)

        def finish() -> None:
            """Wait for the ranks' packets, and decode them into ``out``; `Work.wait` calls it."""
            sent.wait()
            targets = out.view(self.world_size, size)
            for rank in self._group.coded_ranks(out.device):
                packets.read(arrived[rank], targets[rank])

        return Work(tag, buffers=(out, arrived), finish=finish)


class QuantizedReduce:
    """`Group.reduce_scatter` in two hops with every message encoded by ``codec``: inside the node, then across nodes. A
    hop is one all-to-all over a part of the ranks, and the sum of what arrives.

    ``inside``: the L ranks of this rank's node; ``across``: the ranks with this rank's number in the G nodes. Rank g*L
    + l of the reduction is rank l of node g. L and G may be any numbers, 1 included, and slices have any length. If
    other collectives run on the two groups meanwhile, every rank must start them at the same point.

    Attributes:
        rank: this rank's number in the reduction.
        world_size: L*G.
    """

    def __init__(self, inside: Group, across: Group, codec: Codec) -> None:
        self._inside = inside
        self._across = across
        self._codec = codec
        self.rank = across.rank * inside.world_size + inside.rank
        self.world_size = inside.world_size * across.world_size
        self._open: deque[_QuantizedReduction] = deque()
        self._streams = HopStreams(inside.ledger)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """Start to average the N ranks' ``flat`` (1-D, floating, N*s elements) and to give slice r to rank r, in its
        ``out`` (s elements).

        A shorter ``flat`` counts as padded with zeros. Sums run in rank order, in float32 (float64 for a float64
        ``out``), and are divided once by N; with ``accumulate`` the average is added to ``out``. Use neither tensor
        until `Work.wait` has returned. With L ranks in each of G nodes, sends G*(L-1) packets of s elements inside the
        node, G-1 across. Raises ValueError for a longer ``flat``.

        On the CPU the second hop starts in `Work.advance` or `Work.wait`, which first start those of earlier
        reductions; an accelerator gets both hops at once, see [Note: streams of the hops] in hop_streams.py. Every rank
        must start its reductions, and wait for them, in the same order.
        """
        size = out.numel()
        if flat.numel() > size * self.world_size:
            raise ValueError(
                f"{tag}: expected flat of at most {size * self.world_size} elements, {size} for each of "
                f"{self.world_size} ranks, got {flat.numel()}"
            )
        if size == 0:
            return Work(tag)
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        sums = torch.zeros((self._across.world_size, size), dtype=wide, device=out.device)

        def begin() -> _QuantizedReduction:
            """Start the hop inside the node, and return the reduction that is now in flight."""
            return _QuantizedReduction(self._inside, self._across, self._codec, flat, out, sums, tag, accumulate)

        if flat.device.type != "cpu":
            end = self._streams.run(flat.device, lambda: begin().summed(), _QuantizedReduction.finish)
            return Work(tag, [(end, None)], buffers=(flat, out, sums), ledger=self._inside.ledger)
        reduction = begin()
        self._open.append(reduction)

        def finish() -> None:
            """Start the second hop unless it has started, wait for it, and write the average into ``out``; `Work.wait`
            calls it."""
            self._advance(reduction)
            reduction.finish()

        return Work(tag, buffers=(flat, out), finish=finish, advance=lambda: self._advance(reduction))

    def drop_unfinished(self) -> None:
        """Forget the reductions whose second hop has not started, without waiting for them. Called after a failure; see
        `Reduction.drop_unfinished`."""
        self._open.clear()

    def _advance(self, until: _QuantizedReduction) -> None:
        """Start the second hop of the reductions in flight whose second hop has not started, in order, up to and
        including ``until``; do nothing if that of ``until`` has. Waits for the first hops."""
        while until in self._open:
            self._open[0].start_across()
            self._open.popleft()


class _Hop:
    """One all-to-all of encoded slices over ``group``, started by the constructor, and the sums of the slices that
    arrive.

    ``slices``: of shape (ranks of ``group``, k, s); row r goes to rank r, as k packets, of which ``numbers`` are
    encoded and decoded (see `Group.coded_ranks`). This rank's own row is not encoded.
    """

    def __init__(
        self, group: Group, packets: Packets, slices: torch.Tensor, tag: Tag, numbers: Sequence[int] = (0,)
    ) -> None:
        ranks, count, _ = slices.shape
        self._rank = group.rank
        self._numbers = numbers
        self._coded = group.coded_ranks(slices.device)
        self._packets = packets
        self._own = slices[group.rank]
        sent = packets.empty(ranks * count, slices.device).view(ranks, count, -1)
        self._arrived = torch.empty_like(sent)
        for rank in self._coded:
            if rank != group.rank:
                for number in numbers:
                    packets.write(slices[rank, number], sent[rank, number])
        self._work = group.all_to_all(self._arrived, sent, tag)

    def add_to(self, sums: torch.Tensor) -> None:
        """Wait for the hop, and add the slices of all ranks, in rank order, to ``sums``: of shape (k, s), floating,
        changed in place."""
        self._work.wait()
        decoded = torch.empty_like(sums[0])
        for rank in self._coded:
            for number in self._numbers:
                if rank == self._rank:
                    sums[number].add_(self._own[number])
                else:
                    self._packets.read(self._arrived[rank, number], decoded)
                    sums[number].add_(decoded)


class _QuantizedReduction:
    """One reduction in flight: the constructor starts the hop inside the node; call `start_across`, then `finish`.

    The arguments are those of `QuantizedReduce` and of its `reduce_scatter`. ``sums``: zeros of shape (nodes, s), one
    row for each node's slice, in which the values of this node's ranks are added up.
    """

    def __init__(
        self,
        inside: Group,
        across: Group,
        codec: Codec,
        flat: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        tag: Tag,
        accumulate: bool,
    ) -> None:
        self._across = across
        self._packets = Packets(codec, out.numel())
        self._out = out
        self._tag = tag
        self._accumulate = accumulate
        self._sums = sums
        self._world_size = inside.world_size * across.world_size
        slices = _padded(flat, self._world_size * out.numel()).view(across.world_size, inside.world_size, -1)
        nodes = across.coded_ranks(flat.device)
        self._inside_hop = _Hop(inside, self._packets, slices.transpose(0, 1), tag, nodes)
        self._is_summed = False
        self._across_hop: _Hop | None = None

    def summed(self) -> _QuantizedReduction:
        """Wait for the hop inside the node and add up its values in ``sums``, at the first call; return this
        reduction."""
        if not self._is_summed:
            self._is_summed = True
            self._inside_hop.add_to(self._sums)
        return self

    def start_across(self) -> _Hop:
        """Start to send this node's sums to the other nodes, at the first call, once `summed` has them; return that
        second hop."""
        if self._across_hop is None:
            self.summed()
            self._across_hop = _Hop(self._across, self._packets, self._sums.unsqueeze(1), self._tag)
        return self._across_hop

    def finish(self) -> None:
        """Wait for the second hop, and write the average over all ranks into ``out``, or with ``accumulate`` add it
        there."""
        totals = torch.zeros_like(self._sums[:1])
        self.start_across().add_to(totals)
        total = totals[0]
        if self._accumulate:
            self._out.add_(total / self._world_size)
        else:
            torch.div(total, self._world_size, out=self._out)


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """Return a copy of the 1-D ``flat`` followed by zeros up to ``numel`` elements; ``flat`` itself if it has as
    many."""
    return flat if flat.numel() == numel else torch.cat((flat, flat.new_zeros(numel - flat.numel())))
