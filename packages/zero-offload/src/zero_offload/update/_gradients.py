"""Gradients between backward and the step, kept by the caller or in host memory. A span is consecutive elements of a
fragment; a slice is the spans that are updated together; its index is its position in the list of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from zero_optim_kernels import l2_norm_squared

from .._copy_streams import CopyStream
from .._memory import HostBlock, nbytes_of
from ..ends import HostUse
from ..errors import ShardError
from ..trace import Trace
from ._slices import FlatSpan, Slice
from .plans import KERNEL_DTYPES, ShardPlan, check_shard_tensor

__all__ = [
    "CallerGradients",
    "CollectedGradients",
    "Gradients",
    "HOP",
    "HostGradients",
    "copy_to_host",
    "gradient_bytes",
    "known_shard",
    "borrowed_gradient",
    "norm_squared",
]

HOP = "gradients"
_T = TypeVar("_T")


class Gradients(Protocol):
    """The gradients that the step reads, one slice at a time. Per slice: `prefetch` (optional), `acquire`, use,
    `release`. A shard has a gradient from the time when one is handed over until `clear`.
    """

    def has(self, shard: str) -> bool:
        """Return whether the shard has a gradient for the next step."""

    def prefetch(self, index: int) -> None:
        """Start bringing the gradients of slice ``index`` to host memory, before it is acquired; a hint, which may do
        nothing.
        """

    def acquire(self, index: int) -> list[FlatSpan | None]:
        """Return the gradient of each span of slice ``index``, in the order of the spans; None for a span whose shard
        has no gradient. They are on any device and valid until `release`. ShardError if one cannot be read.
        """

    def release(self, index: int) -> None:
        """End the use of the gradients that `acquire` returned for slice ``index``; the step does not read
        them again.
        """

    def abort(self) -> None:
        """End the use of all gradients that `acquire` returned and `release` has not ended, after a step that
        failed.
        """

    def clear(self) -> None:
        """Discard all gradients: no shard has one until the next is collected or given."""

    def memory(self) -> dict[str, int]:
        """Return the bytes held, by what holds them: ``gradients`` in host memory, ``nvme`` in files, ``device`` on the
        accelerator.
        """

    def bytes_written(self) -> int:
        """Return the bytes written to drives so far."""

    def flush(self) -> None:
        """Block until every collected gradient has arrived in host memory or in its file; raise the first write that
        failed.
        """

    def close(self) -> None:
        """Free the memory and remove the files."""


class CollectedGradients(Gradients, Protocol):
    """`Gradients` that are handed over during backward, shard by shard, and summed until `clear`."""

    def borrow(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return host memory for a shard's gradient (1-D, all elements, in the shard's ``grad_dtype``), and whether it
        holds the sum of the gradients so far; if not, its content is arbitrary.

        The memory is valid until `give_back`, which must precede the next `borrow` or `add` for the shard. ShardError
        if the shard is not updated here, and if its gradient cannot be read; StoreFullError if too many are borrowed.
        """

    def give_back(self, shard: str, *, dirty: bool) -> None:
        """End one `borrow`. With ``dirty`` the content of the memory is the shard's gradient from now on; without, the
        borrower has changed nothing, and a shard that had no gradient still has none. ShardError if the shard is not
        updated here.
        """

    def add(self, shard: str, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Add a gradient of the shard's size, on any device, to the sum. Return the sum on that device, in 1-D parts
        that follow each other, valid for work that is queued before the next `add`.

        The caller may free the tensor at once, but not write to it before `flush`. ShardError if the shard is not
        updated here.
        """

    def join(self) -> None:
        """Make the current stream wait for gradients on their way from the device; the host does not wait."""


class CallerGradients:
    """`Gradients` that the caller keeps and passes to each step by `give`. ``shards``: those that are updated;
    ``slices``: what the step reads, by index.
    """

    def __init__(self, shards: Sequence[ShardPlan], slices: Sequence[Slice]) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._slices = slices
        self._given: Mapping[str, torch.Tensor] = {}

    def give(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set the gradients of the next step (1-D, of the whole shard, by shard name); shards that are missing have
        none.

        They are not copied: leave them unchanged until the step has ended. ShardError for an unknown shard and for a
        wrong shape or dtype.
        """
        for name, gradient in gradients.items():
            shard = known_shard(self._shards, name)
            check_shard_tensor(gradient, shard, shard.grad_dtype, "a gradient")
        self._given = gradients

    def has(self, shard: str) -> bool:
        """Return whether the shard's gradient was given for the next step."""
        return shard in self._given

    def prefetch(self, index: int) -> None:
        """Do nothing: the caller keeps the gradients where they are."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        """Return, for each span of slice ``index``, the part of the given gradient that belongs to it, without a copy;
        None for a span whose shard was given none.
        """
        given = [self._given.get(span.fragment.shard.name) for span in self._slices[index]]
        return [None if g is None else s.of_shard(g) for s, g in zip(self._slices[index], given, strict=True)]

    def release(self, index: int) -> None:
        """Do nothing: the caller keeps the gradients."""

    def abort(self) -> None:
        """Forget the given gradients, after a step that failed."""
        self._given = {}

    def clear(self) -> None:
        """Forget the given gradients."""
        self._given = {}

    def memory(self) -> dict[str, int]:
        """Return 0 bytes for ``gradients``, ``nvme`` and ``device``, as the caller owns the gradients."""
        return {"gradients": 0, "nvme": 0, "device": 0}

    def bytes_written(self) -> int:
        """Return 0: there are no files."""
        return 0

    def flush(self) -> None:
        """Do nothing: no transfer is under way."""

    def close(self) -> None:
        """Forget the given gradients."""
        self._given = {}


def gradient_bytes(shards: Sequence[ShardPlan]) -> int:
    """Return the bytes of the gradients of all ``shards`` together, each in its ``grad_dtype``."""
    return sum(shard.numel * shard.grad_dtype.itemsize for shard in shards)


class HostGradients:
    """`CollectedGradients` in one block of host memory of exactly the size of all gradients, allocated by the
    constructor.

    ``shards``: whose gradients are collected. ``slices``: what the step reads, by index. ``device``: where gradients
    are computed. ``pin``: the memory is pinned, so that copies run beside compute. ``trace``: records the copies.
    """

    def __init__(
        self,
        shards: Sequence[ShardPlan],
        slices: Sequence[Slice],
        device: torch.device,
        *,
        pin: bool,
        trace: Trace | None,
    ) -> None:
        self._slices = slices
        self._copy_stream = CopyStream(device, trace, HOP)
        parts = tuple((shard.name, gradient_bytes([shard])) for shard in shards)
        self._block = HostBlock(gradient_bytes(shards), HostUse("gradients", pin=pin, parts=parts))
        self._views: dict[str, torch.Tensor] = {}
        self._present: set[str] = set()
        self._arriving: dict[str, torch.Event] = {}
        position = 0
        for shard in sorted(shards, key=lambda shard: -shard.grad_dtype.itemsize):
            view = self._views[shard.name] = self._block.view(position, shard.numel, shard.grad_dtype)
            position += nbytes_of(view)

    def borrow(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return the shard's part of the block (1-D), after its gradient has arrived from the device, and whether it
        holds the sum of the gradients so far; if not, its content is arbitrary. ShardError for an unknown shard.
        """
        self._wait_for(shard)
        return known_shard(self._views, shard), shard in self._present

    def give_back(self, shard: str, *, dirty: bool) -> None:
        """End one `borrow`; with ``dirty`` the shard has a gradient now. Nothing is copied. ShardError for an unknown
        shard.
        """
        known_shard(self._views, shard)
        if dirty:
            self._present.add(shard)

    def add(self, shard: str, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Start copying a gradient to the shard's part of the block, added to the sum so far; return the sum on the
        gradient's device, as one part, which for the first gradient is ``gradient`` itself. The tensor may be freed at
        once, but not written before `flush`. ShardError for an unknown shard.
        """
        own, again = known_shard(self._views, shard), shard in self._present
        if gradient.device.type == "cpu":
            self._wait_for(shard)
        event, total = copy_to_host(self._copy_stream, own, gradient, again=again)
        if event is not None:
            self._arriving[shard] = event
        self._present.add(shard)
        return [total]

    def join(self) -> None:
        """Make the current stream wait for the copies of gradients to the block; the host does not wait."""
        for event in self._arriving.values():
            self._copy_stream.join(event)

    def arriving(self, shard: str) -> torch.Event | None:
        """Return the event that is reached when the shard's gradient has arrived from the device; None if none is on
        its way.
        """
        return self._arriving.get(shard)

    def memory_of(self, shard: str) -> torch.Tensor:
        """Return the shard's part of the block (1-D) at once, also while a gradient is on its way there. ShardError for
        an unknown shard.
        """
        return known_shard(self._views, shard)

    def has(self, shard: str) -> bool:
        """Return whether the shard has a gradient since the last `clear`."""
        return shard in self._present

    def prefetch(self, index: int) -> None:
        """Do nothing: the gradients are in host memory."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        """Return the gradient of each span of slice ``index``, a part of the block, once it has arrived from the
        device; None for a span whose shard has no gradient. Valid until `clear`.
        """
        found: list[FlatSpan | None] = []
        for span in self._slices[index]:
            shard = span.fragment.shard.name
            self._wait_for(shard)
            found.append(span.of_shard(self._views[shard]) if shard in self._present else None)
        return found

    def release(self, index: int) -> None:
        """Do nothing: the gradients stay until `clear`."""

    def abort(self) -> None:
        """Do nothing after a step that failed: the gradients stay in the block, and `acquire` took no memory that is to
        be freed.
        """

    def clear(self) -> None:
        """Forget all gradients; the memory stays."""
        self._present.clear()

    def memory(self) -> dict[str, int]:
        """Return the bytes of the block as ``gradients``; ``nvme`` and ``device`` are 0."""
        return {"gradients": self._block.nbytes, "nvme": 0, "device": 0}

    def bytes_written(self) -> int:
        """Return 0: there are no files."""
        return 0

    def flush(self) -> None:
        """Block until every gradient has arrived from the device."""
        for shard in list(self._arriving):
            self._wait_for(shard)

    def close(self) -> None:
        """Wait for copies under way and free the block; tensors over it keep it alive."""
        self.flush()
        self._views.clear()
        self._block = HostBlock(0, HostUse("nothing"))

    def _wait_for(self, shard: str) -> None:
        """Wait until a shard's gradient has arrived from the device; return at once if it is not on its way.

        Copies follow each other in one stream, so the first call waits for all that are on their way, and the host
        waits only once.
        """
        event = self._arriving.pop(shard, None)
        if event is None:
            return
        for awaited in (next(reversed(self._arriving.values()), event), event):
            if not event.query():
                awaited.synchronize()


def copy_to_host(
    stream: CopyStream, own: torch.Tensor, gradient: torch.Tensor, *, again: bool
) -> tuple[torch.Event | None, torch.Tensor]:
    """Start copying ``gradient`` to ``own``, host memory of the same size, or with ``again`` adding it to the content.
    Return (event, sum): the event that is reached when ``own`` is complete, None if it is already; and the sum on the
    gradient's device, ``gradient`` itself unless ``again``.

    On an accelerator the sum is computed there, so that the host does not wait for it. ``stream``: where the copies
    run.
    """
    if not again:
        return stream.copy(own, gradient), gradient
    if gradient.device == own.device:
        return None, own.add_(gradient)
    total = torch.empty_like(own, device=gradient.device)
    stream.join(stream.copy(total, own))
    total.add_(gradient)
    return stream.copy(own, total), total


@contextmanager
def borrowed_gradient(gradients: CollectedGradients, shard: str, *, dirty: bool) -> Iterator[torch.Tensor]:
    """Return a context manager that yields a shard's collected gradient in host memory (1-D), valid inside its block.

    ``dirty``: the caller changes the gradient, and the change is kept, also after an exception. ShardError on entry if
    the shard has no gradient.
    """
    if not gradients.has(shard):
        raise ShardError(f"'{shard}' has no gradient", tensor=shard)
    tensor, _ = gradients.borrow(shard)
    try:
        yield tensor
    finally:
        gradients.give_back(shard, dirty=dirty)


def known_shard(table: Mapping[str, _T], shard: str) -> _T:
    """Return ``table[shard]``, the entry of a shard that is updated here; ShardError if the table has none."""
    if shard not in table:
        raise ShardError(f"no shard '{shard}' is updated here", tensor=shard)
    return table[shard]


def norm_squared(gradients: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements of flat, contiguous gradients (float32, bfloat16, float16 or
    float64), on any devices; NaN and infinity propagate.

    Each gradient on an accelerator has its norm taken in float32 there, and the host waits for the result.
    """
    here = [grad for grad in gradients if grad.device.type == "cpu"]
    away = [grad for grad in gradients if grad.device.type != "cpu"]
    squared = 0.0
    if away:
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in away])
        squared = float(norms.double().square().sum())
    for dtype, name in KERNEL_DTYPES.items():
        own = [grad for grad in here if grad.dtype == dtype]
        if own:
            squared += l2_norm_squared([g.data_ptr() for g in own], [g.numel() for g in own], dtype=name)  # type: ignore[arg-type]
    return squared
