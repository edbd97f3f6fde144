"""The reduction where several groups of ranks hold a copy of the model each."""

from __future__ import annotations

from collections import deque

import torch

from .group import Group
from .tag import Tag
from .work import Work


class ReplicatedReduce:
    """`Group.reduce` over all copies of the model: inside each copy's ranks, then across the copies.

    ``shard``: the S ranks that share a copy. ``across`` and ``back``: two groups over the R ranks that have the same
    shard; nothing else may use them while reductions are open.

    [Note: order of the sums] In ``out``'s dtype: the slices of a copy's ranks in rank order 0…S-1, then these R sums in
    the order of the copies, divided once by S*R. Every copy ends with the same bits.

    Attributes:
        rank, world_size: of ``shard``: who owns which slice.
    """

    def __init__(self, shard: Group, across: Group, back: Group) -> None:
        self._shard = shard
        self._across = across
        self._back = back
        self.rank = shard.rank
        self.world_size = shard.world_size
        self._open: deque[_Reduction] = deque()

    def reduce(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """Average ``flat`` (S*s elements) of all S*R ranks into ``out`` (s elements) of its R owners.

        With ``accumulate`` the average is added to ``out``. Sends (S-1)*s elements of ``flat``'s dtype inside the copy,
        then 2*(R-1)/R*s of ``out``'s (s rounded up to a multiple of R) across the copies. Every rank starts and waits
        in the same order.
        """
        copies = self._across.world_size
        padded = -(-out.numel() // copies) * copies
        partial = out.new_zeros(padded)
        first = self._shard.reduce(flat, partial[: out.numel()], tag, divisor=1)
        reduction = _Reduction(first, partial, tag)
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

    def _advance(self, until: _Reduction) -> None:
        """Take the open reductions to their last hop, in order, up to ``until``."""
        while until in self._open:
            self._cross(self._open.popleft())

    def _cross(self, reduction: _Reduction) -> None:
        """Sum the copies' slices, each rank a part of them, and start to send the parts back."""
        reduction.last.wait()
        group, tag = self._across, reduction.tag
        whole = reduction.buffer
        part = whole.new_empty(whole.numel() // group.world_size)
        group.reduce(whole, part, tag, divisor=self.world_size * group.world_size).wait()
        reduction.last = self._back.all_gather(whole, part, tag)


class _Reduction:
    """One on its way: ``last`` is the hop under way, which fills ``buffer``."""

    def __init__(self, first: Work, buffer: torch.Tensor, tag: Tag) -> None:
        self.last = first
        self.buffer = buffer
        self.tag = tag
