"""Brings the gradients and weights of one slice at a time to the host, and the new weights back. A span is consecutive
elements of a fragment; a slice is the spans that are updated together.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from .._copy_streams import CopyStream
from .._memory import HostBlock, nbytes_of
from ..ends import HostUse
from ..errors import OffloadError
from ..trace import Trace
from ._gradients import Gradients
from ._slices import FlatSpan, FragmentSpan, Slice
from .plans import ExpectingWeights, ShardPlan, Weights, check_shard_tensor

__all__ = ["StagedSlices", "StagedSpan", "staging_bytes"]

_ALIGN = 64
_AHEAD = 2  # slices whose gradients and weights are asked for, as far as buffers are free


class StagedSpan(NamedTuple):
    """A span to be updated: its ``number`` in the slice, its gradient, the memory for its new weights (``out``), and
    the ``weights`` that forward has read, on their own device. Gradient and ``out`` are in host memory, unless the
    slice stays on an accelerator. ``out`` is ``weights`` itself where those need no copy.
    """

    number: int
    span: FragmentSpan
    grad: FlatSpan
    out: FlatSpan
    weights: FlatSpan


def staging_bytes(slices: Sequence[Slice], *, gradients_too: bool) -> int:
    """Return the host memory, in bytes, that `StagedSlices` needs for tensors on an accelerator: two buffers, each for
    the weights, and with ``gradients_too`` the gradients, of the largest slice.
    """

    def needed(slice_: Slice) -> int:
        """Return the bytes that one slice takes in a staging buffer."""
        return sum(
            _aligned(span.length * span.fragment.shard.dtype.itemsize)
            + gradients_too * _aligned(span.length * span.fragment.shard.grad_dtype.itemsize)
            for span in slice_
        )

    return 2 * max(map(needed, slices), default=0)


def _aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of 64 bytes, at which each staged tensor begins."""
    return -(-nbytes // _ALIGN) * _ALIGN


class StagedSlices:
    """Brings gradients and weights to the kernels, slice by slice, and new weights back to where forward reads them.

    Call order: `begin` a step, which says in which order slices come; then, for each position in that order, `start`
    (ideally while the previous one computes), `staged_spans`, `finish`; then `end`, or `abort`.

    Tensors on an accelerator (``device``) pass through two alternating staging buffers in host memory (``staging``
    bytes in all, from `staging_bytes`; pinned with ``pin``), copied on streams of their own; tensors in host memory,
    and those of the slices in ``on_device``, are used in place. Shards are borrowed from ``weights`` from the first
    slice that needs them to the last. ``trace``, if not None, records the copies.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        gradients: Gradients,
        weights: Weights,
        device: torch.device,
        *,
        staging: int,
        on_device: Container[int] = (),
        pin: bool,
        trace: Trace | None,
    ) -> None:
        self._slices = slices
        self._on_device = on_device
        self._gradients = gradients
        self._weights = weights
        self._in = CopyStream(device, trace, "gradients, device")
        self._out = CopyStream(device, trace, "weights, device")
        self._blocks = [HostBlock(staging // 2, HostUse("staging", pin=pin)) for _ in range(2)] if staging else []
        self._order: Sequence[int] = ()
        self._last: dict[str, int] = {}
        self._absent: Collection[str] = ()
        self._rewritten: Collection[str] = ()
        self._borrowed: dict[str, torch.Tensor] = {}
        self._started: dict[int, list[StagedSpan]] = {}
        self._incoming: list[torch.Event | None] = [None, None]
        self._outgoing: list[torch.Event | None] = [None, None]

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of host memory in the two staging buffers, which are held between steps."""
        return sum(block.nbytes for block in self._blocks)

    @staticmethod
    def is_away(tensor: torch.Tensor) -> bool:
        """Return whether a tensor is not in host memory."""
        return tensor.device.type != "cpu"

    def begin(self, order: Sequence[int], *, absent: Collection[str], rewritten: Collection[str]) -> None:
        """Begin a step over the slices whose indices ``order`` lists. Fragments named in ``absent`` are left out;
        shards named in ``rewritten`` will be written completely, so their old weights are not read.
        """
        self._order = order
        self._absent = absent
        self._rewritten = rewritten
        self._last = {
            span.fragment.shard.name: position for position, index in enumerate(order) for span in self._slices[index]
        }

    def start(self, position: int) -> None:
        """Start bringing the gradients and weights of the slice at ``position`` of the order to the host, and announce
        the next two slices; do nothing beyond the last.

        Spans that are absent or have no gradient are left out; those of slices on the device stay there. Blocks until
        the new weights of two slices ago have left the staging buffer. OffloadError if weights on an accelerator are to
        be updated in place; ShardError if weights or gradients cannot be read or do not fit their plan.
        """
        if position >= len(self._order):
            return
        index = self._order[position]
        for later in self._order[position + 1 : position + 1 + _AHEAD]:
            self._gradients.prefetch(later)
            self._expect_weights(later)
        side = position % 2
        _synchronize(self._outgoing[side])  # the block's weights of two slices ago must have left
        self._outgoing[side] = None
        offset = 0
        staged_spans: list[StagedSpan] = []
        spans = self._slices[index]
        for number, (span, grad) in enumerate(zip(spans, self._gradients.acquire(index), strict=True)):
            if grad is None or span.fragment.name in self._absent:
                continue
            weights = out = span.of_shard(self._borrowed_weights(span.fragment.shard))
            if index in self._on_device:
                staged_spans.append(StagedSpan(number, span, grad, out, weights))
                continue
            if self.is_away(grad.base):
                staged = self._staging_span(side, offset, grad)
                offset += _aligned(nbytes_of(staged.base))
                self._incoming[side] = self._in.copy(staged.base, grad.view()) or self._incoming[side]
                grad = staged
            if self.is_away(weights.base):
                if not span.fragment.keeps_master:
                    raise OffloadError(
                        f"'{span.fragment.shard.name}': expected weights in host memory, to be updated in place, "
                        f"got them on {weights.base.device}; plan the shard with in_place=False"
                    )
                out = self._staging_span(side, offset, weights)
                offset += _aligned(nbytes_of(out.base))
            staged_spans.append(StagedSpan(number, span, grad, out, weights))
        self._started[position] = staged_spans

    def staged_spans(self, position: int) -> list[StagedSpan]:
        """Return the spans to be updated of the slice that was started at ``position`` of the order, once its gradients
        have arrived; their host memory is valid until `finish`.
        """
        side = position % 2
        _synchronize(self._incoming[side])
        self._incoming[side] = None
        return self._started[position]

    def finish(self, position: int) -> None:
        """Start copying the new weights of the slice at ``position`` of the order, which is computed, to their device;
        release its gradients, and give back the shards that no later slice needs.
        """
        side = position % 2
        for staged_span in self._started.pop(position):
            if staged_span.out is not staged_span.weights:
                self._outgoing[side] = self._out.copy(staged_span.weights.view(), staged_span.out.view())
        index = self._order[position]
        self._gradients.release(index)
        done = {span.fragment.shard.name for span in self._slices[index]}
        done = {shard for shard in done & self._borrowed.keys() if self._last[shard] == position}
        if done:
            self._out.join(self._outgoing[side])
        for shard in sorted(done):
            del self._borrowed[shard]
            self._weights.give_back(shard, dirty=True)

    def end(self) -> None:
        """Make the current stream of the device wait for all copies of new weights; the host does not block."""
        for event in self._outgoing:
            self._out.join(event)

    def abort(self) -> None:
        """After a failure, wait for all copies, release the gradients and give back every borrowed shard; errors of
        giving back are suppressed.
        """
        for event in (*self._incoming, *self._outgoing):
            _synchronize(event)
        self._incoming, self._outgoing = [None, None], [None, None]
        self._started.clear()
        self._gradients.abort()
        while self._borrowed:
            shard, _ = self._borrowed.popitem()
            with suppress(OffloadError):  # the failure that led here is the one to be told
                self._weights.give_back(shard, dirty=True)

    def _staging_span(self, side: int, offset: int, piece: FlatSpan) -> FlatSpan:
        """Return memory of staging buffer ``side`` (0 or 1), ``offset`` bytes from its start, as a span with the length
        and dtype of ``piece``; its content is arbitrary.
        """
        return FlatSpan(self._blocks[side].view(offset, piece.length, piece.base.dtype), 0, piece.length)

    def _expect_weights(self, index: int) -> None:
        """Announce the shards of slice ``index`` to the weights, if these can be prefetched, but for shards that are
        borrowed or will be rewritten.
        """
        if isinstance(self._weights, ExpectingWeights):
            shards = dict.fromkeys(span.fragment.shard.name for span in self._slices[index])
            self._weights.expect([s for s in shards if s not in self._borrowed and s not in self._rewritten])

    def _borrowed_weights(self, shard: ShardPlan) -> torch.Tensor:
        """Return a shard's weights (1-D), borrowed at the first call in a step. If the shard will be rewritten, its
        padding is set to zero. ShardError if what the owner lends does not have the planned shape and dtype.
        """
        if shard.name not in self._borrowed:
            fresh = shard.name in self._rewritten
            lent = self._weights.borrow(shard.name, fresh=fresh)
            self._borrowed[shard.name] = lent
            check_shard_tensor(lent, shard, shard.dtype, "weights")
            if fresh and shard.padding:
                lent[shard.numel - shard.padding :].zero_()
        return self._borrowed[shard.name]


def _synchronize(event: torch.Event | None) -> None:
    """Block until the event is reached; return at once for None."""
    if event is not None and not event.query():
        event.synchronize()
