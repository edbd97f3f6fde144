"""The reduction where several groups of ranks hold a copy of the model each."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

from .tag import Tag
from .work import Work


class Reduction(Protocol):
    """Averages a flat buffer into the owners' slices: `Group` does, and so do its relatives in several hops."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """See `Group.reduce_scatter`."""

    def drop_open(self) -> None:
        """See `Group.drop_open`."""


class Gather(Protocol):
    """Fills a flat buffer with the ranks' slices: `Group` does, and `QuantizedGather`."""

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        """See `Group.all_gather`."""


class ReplicatedReduce:
    """`Group.reduce_scatter` over all copies of the model: inside each copy's ranks, then across the copies.

    ``shard``: over the S ranks that share a copy. ``across`` and ``back``: over the R ranks that have the same shard,
    on two groups of their own. ``rounds``: whether numbers are cast to ``flat``'s dtype before they go to other copies,
    as they are not where ``across`` and ``back`` have codecs.

    [Note: order of the averages] First that of a copy's ranks in rank order 0…S-1, then that of these R averages in the
    order of the copies. In between they are no larger than gradients are: what fits the wire once fits it again. The
    average comes back in the form in which it travels, to its owners too: every copy ends with the same bits.

    Attributes:
        rank, world_size: of ``shard``: who owns which slice.
    """

    def __init__(self, shard: Reduction, across: Reduction, back: Gather, *, rounds: bool = True) -> None:
        self._shard = shard
        self._across = across
        self._back = back
        self._rounds = rounds
        self.rank = shard.rank
        self.world_size = shard.world_size
        self._open: deque[_ReplicatedReduction] = deque()

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """Average ``flat`` (S*s elements) of all S*R ranks into ``out`` (s elements) of its R owners.

        With ``accumulate`` the average is added to ``out``; sums run in ``out``'s dtype. Sends (S-1)*s elements of
        ``flat``'s dtype inside the copy, then 2*(R-1)/R*s of the same dtype (s rounded up to a multiple of R) across
        the copies; packets instead where there are codecs. Every rank starts and waits in the same order.
        """
        copies = self._across.world_size
        partial = out.new_zeros(-(-out.numel() // copies) * copies)
        first = self._shard.reduce_scatter(flat, partial[: out.numel()], tag)
        reduction = _ReplicatedReduction(first, partial, flat.dtype if self._rounds else out.dtype, tag)
        self._open.append(reduction)

        def finish() -> None:
            self._advance(reduction)
            reduction.last.wait()
            average = reduction.buffer[: out.numel()]
            if accumulate:
                out.add_(average)
            else:
                out.copy_(average)

        return Work(tag, buffers=(flat, out), finish=finish, advance=lambda: self._advance(reduction))

    def drop_open(self) -> None:
        """See `Group.drop_open`."""
        self._open.clear()
        self._shard.drop_open()
        self._across.drop_open()

    def _advance(self, until: _ReplicatedReduction) -> None:
        """Take the open reductions to their last hop, in order, up to ``until``."""
        while until in self._open:
            self._cross(self._open.popleft())

    def _cross(self, reduction: _ReplicatedReduction) -> None:
        """Average the copies' slices, each rank a part of them, and start to send the parts back."""
        reduction.last.wait()
        part = reduction.buffer.new_empty(reduction.buffer.numel() // self._across.world_size)
        reduction.buffer = whole = reduction.buffer.to(reduction.wire)
        self._across.reduce_scatter(whole, part, reduction.tag).wait()
        reduction.last = self._back.all_gather(whole, part.to(reduction.wire), reduction.tag)


class _ReplicatedReduction:
    """One on its way: ``last`` is the hop under way, which fills ``buffer``; it goes to other copies in ``wire``."""

    def __init__(self, first: Work, buffer: torch.Tensor, wire: torch.dtype, tag: Tag) -> None:
        self.last = first
        self.buffer = buffer
        self.wire = wire
        self.tag = tag
