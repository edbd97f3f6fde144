"""Gradients of which a part stays on the accelerator, because its states do. A span is consecutive elements of a
fragment; a slice is the spans that are updated together; its index is its position in the list of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .._memory import nbytes_of
from ..trace import Trace
from ._gradients import HostGradients, known_shard
from ._slices import FlatSpan, Slice
from .plans import ShardPlan

__all__ = ["SplitGradients", "host_parts"]


def host_parts(shards: Sequence[ShardPlan], kept: Sequence[Slice]) -> list[ShardPlan]:
    """Return the plan of each shard, in order, with ``numel`` reduced to the elements whose gradients go to host
    memory: those before the first element of ``kept``, the slices that stay on the device. These slices hold the last
    fragments of a shard, or all of them; then ``numel`` is 0.
    """
    begins: dict[str, int] = {}
    for span in (span for slice_ in kept for span in slice_):
        start, name = span.fragment.plan.start + span.begin, span.fragment.shard.name
        begins[name] = min(start, begins.get(name, start))
    counts = {s.name: begins.get(s.name, s.numel) for s in shards}
    return [
        replace(s, numel=0 if s.fragments and counts[s.name] <= s.fragments[0].start else counts[s.name])
        for s in shards
    ]


class SplitGradients:
    """`CollectedGradients` whose first elements of each shard, as `host_parts` says, go to host memory, while the
    others stay on ``device``, where gradients are computed.

    ``shards``: whose gradients are collected. ``slices``: what the step reads, by index; ``kept``: those that stay on
    the device. ``pin``: the host memory is pinned, so that copies run beside compute. ``trace``, if not None, records
    the copies.
    """

    def __init__(
        self,
        shards: Sequence[ShardPlan],
        slices: Sequence[Slice],
        kept: Sequence[Slice],
        device: torch.device,
        *,
        pin: bool,
        trace: Trace | None,
    ) -> None:
        parts = host_parts(shards, kept)
        self._slices = slices
        self._counts = {part.name: part.numel for part in parts}
        self._host = HostGradients(parts, (), device, pin=pin, trace=trace)
        self._rest = {
            shard.name: torch.empty(shard.numel - part.numel, dtype=shard.grad_dtype, device=device)
            for shard, part in zip(shards, parts, strict=True)
            if shard.numel > part.numel
        }
        self._lent: dict[str, torch.Tensor] = {}

    def borrow(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return host memory for all of a shard's gradient (1-D), and whether it holds the sum of the gradients so far;
        if not, its content is arbitrary. If a part of the gradient is on the device, the memory is a copy, for which
        the host waits. ShardError for an unknown shard.
        """
        own, again = self._host.borrow(shard)
        rest = self._rest.get(shard)
        if rest is None:
            return own, again
        self._lent[shard] = torch.cat([own, rest.to("cpu")]) if again else own.new_empty(own.numel() + rest.numel())
        return self._lent[shard], again

    def give_back(self, shard: str, *, dirty: bool) -> None:
        """End one `borrow`; with ``dirty`` the content of the memory is the shard's gradient from now on, copied to its
        part in host memory and its part on the device. ShardError for an unknown shard.
        """
        lent = self._lent.pop(shard, None)
        if lent is not None and dirty:
            count = self._counts[shard]
            self._host.borrow(shard)[0].copy_(lent[:count])
            self._rest[shard].copy_(lent[count:])
        self._host.give_back(shard, dirty=dirty)

    def add(self, shard: str, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Start copying a gradient's first elements to host memory, and add the others to the sum on the device; return
        the sum on the device, in 1-D parts that follow each other. ShardError for an unknown shard.
        """
        count, rest = known_shard(self._counts, shard), self._rest.get(shard)
        if rest is None:
            return self._host.add(shard, gradient)
        again = self.has(shard)
        if count:
            parts = self._host.add(shard, gradient[:count])
        else:
            parts = ()
            self._host.give_back(shard, dirty=True)
        (rest.add_ if again else rest.copy_)(gradient[count:])
        return [*parts, rest]

    def join(self) -> None:
        """Make the current stream wait for the copies of gradients to host memory; the host does not wait."""
        self._host.join()

    def has(self, shard: str) -> bool:
        """Return whether the shard has a gradient since the last `clear`."""
        return self._host.has(shard)

    def prefetch(self, index: int) -> None:
        """Do nothing: the gradients are where they are needed."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        """Return the gradient of each span of slice ``index``: in host memory, once it has arrived there, or on the
        device; None for a span whose shard has no gradient. Valid until `clear`.
        """
        found: list[FlatSpan | None] = []
        for span in self._slices[index]:
            shard, start = span.fragment.shard.name, span.fragment.plan.start + span.begin
            count = self._counts[shard]
            if not self.has(shard):
                found.append(None)
            elif start < count:
                found.append(FlatSpan(self._host.borrow(shard)[0], start, span.length))
            else:
                found.append(FlatSpan(self._rest[shard], start - count, span.length))
        return found

    def release(self, index: int) -> None:
        """Do nothing: the gradients stay until `clear`."""

    def abort(self) -> None:
        """Do nothing after a step that failed: the gradients stay where they are, and `acquire` took no memory that is
        to be freed.
        """

    def clear(self) -> None:
        """Forget all gradients; the memory stays."""
        self._host.clear()

    def memory(self) -> dict[str, int]:
        """Return the bytes in host memory as ``gradients``, those on the device as ``device``; ``nvme`` is 0."""
        return {**self._host.memory(), "device": sum(map(nbytes_of, self._rest.values()))}

    def bytes_written(self) -> int:
        """Return 0: there are no files."""
        return 0

    def flush(self) -> None:
        """Block until every gradient has arrived from the device."""
        self._host.flush()

    def close(self) -> None:
        """Wait for copies under way and free the memory; tensors over it keep it alive."""
        self._host.close()
        self._rest.clear()
