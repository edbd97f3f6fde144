"""Gradients kept by the caller or in host memory between backward and the step."""

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
    """The gradients that the step reads. Per slice: `prefetch` (optional), `acquire`, use, `release`."""

    def has(self, shard: str) -> bool:
        """Return whether the shard has a gradient."""

    def prefetch(self, index: int) -> None:
        """Start bringing the gradients of a slice to host memory, before it is acquired."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        """Return the gradient of each span of a slice, on any device, valid until `release`; None for shards without
        one.
        """

    def release(self, index: int) -> None:
        """Release the memory of an acquired slice's gradients; the step does not read them again."""

    def abort(self) -> None:
        """Discard all acquired gradients after a step that failed."""

    def clear(self) -> None:
        """Discard all gradients."""

    def memory(self) -> dict[str, int]:
        """Return the bytes by what holds them: ``gradients`` in host memory, ``nvme`` in files."""

    def bytes_written(self) -> int:
        """Return the bytes written to drives so far."""

    def flush(self) -> None:
        """Block until every collected gradient has arrived; raise the first write that failed."""

    def close(self) -> None:
        """Free the memory and remove the files."""


class CollectedGradients(Gradients, Protocol):
    """Gradients that are handed over during backward and summed."""

    def borrow(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return host memory for a shard's gradient, and whether it holds the sum so far (else its content is
        arbitrary).
        """

    def give_back(self, shard: str, *, dirty: bool) -> None:
        """End one `borrow`; with ``dirty`` the borrower wrote the gradient."""

    def add(self, shard: str, gradient: torch.Tensor) -> None:
        """Add a gradient of the shard's size, on any device, to the sum; the tensor may be freed at once."""


class CallerGradients:
    """Gradients that the caller keeps and passes to each step."""

    def __init__(self, shards: Sequence[ShardPlan], slices: Sequence[Slice]) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._slices = slices
        self._given: Mapping[str, torch.Tensor] = {}

    def give(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set the gradients (1-D, of the whole shard) of the next step; shards that are missing have none. ShardError
        for a wrong size or dtype.
        """
        for name, gradient in gradients.items():
            shard = known_shard(self._shards, name)
            check_shard_tensor(gradient, shard, shard.grad_dtype, "a gradient")
        self._given = gradients

    def has(self, shard: str) -> bool:
        return shard in self._given

    def prefetch(self, index: int) -> None:
        """Do nothing: the caller has the gradients."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        given = [self._given.get(span.fragment.shard.name) for span in self._slices[index]]
        return [None if g is None else s.of_shard(g) for s, g in zip(self._slices[index], given, strict=True)]

    def release(self, index: int) -> None:
        """Do nothing: the caller has the gradients."""

    def abort(self) -> None:
        self._given = {}

    def clear(self) -> None:
        self._given = {}

    def memory(self) -> dict[str, int]:
        return {"gradients": 0, "nvme": 0}

    def bytes_written(self) -> int:
        return 0

    def flush(self) -> None:
        """Do nothing: no transfer is under way."""

    def close(self) -> None:
        self._given = {}


def gradient_bytes(shards: Sequence[ShardPlan]) -> int:
    """Return the bytes of all shards' gradients."""
    return sum(shard.numel * shard.grad_dtype.itemsize for shard in shards)


class HostGradients:
    """One block of host memory of exactly the size of all gradients."""

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
        self._wait_for(shard)
        return known_shard(self._views, shard), shard in self._present

    def give_back(self, shard: str, *, dirty: bool) -> None:
        if dirty:
            self._present.add(shard)

    def add(self, shard: str, gradient: torch.Tensor) -> None:
        own, again = self.borrow(shard)
        event = copy_to_host(self._copy_stream, own, gradient, again=again)
        if event is not None:
            self._arriving[shard] = event
        self._present.add(shard)

    def has(self, shard: str) -> bool:
        return shard in self._present

    def prefetch(self, index: int) -> None:
        """Do nothing: the gradients are in host memory."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        found: list[FlatSpan | None] = []
        for span in self._slices[index]:
            shard = span.fragment.shard.name
            self._wait_for(shard)
            found.append(span.of_shard(self._views[shard]) if shard in self._present else None)
        return found

    def release(self, index: int) -> None:
        """Do nothing: the gradients stay until `clear`."""

    def abort(self) -> None:
        """Do nothing: `acquire` took no memory."""

    def clear(self) -> None:
        self._present.clear()

    def memory(self) -> dict[str, int]:
        return {"gradients": self._block.nbytes, "nvme": 0}

    def bytes_written(self) -> int:
        return 0

    def flush(self) -> None:
        for shard in list(self._arriving):
            self._wait_for(shard)

    def close(self) -> None:
        self.flush()
        self._views.clear()
        self._block = HostBlock(0, HostUse("nothing"))

    def _wait_for(self, shard: str) -> None:
        """Wait until a shard's gradient has arrived from the device, and with it those that are on their way: they
        follow each other in one stream, so the host waits once for all."""
        event = self._arriving.pop(shard, None)
        if event is None:
            return
        for awaited in (next(reversed(self._arriving.values()), event), event):
            if not event.query():
                awaited.synchronize()


def copy_to_host(stream: CopyStream, own: torch.Tensor, gradient: torch.Tensor, *, again: bool) -> torch.Event | None:
    """Start writing a gradient to host memory, or with ``again`` adding it to the content; return the copy's event,
    None if it is done.

    The sum is computed on the gradient's device, so that the host does not wait for it.
    """
    if not again:
        return stream.copy(own, gradient)
    if gradient.device == own.device:
        own.add_(gradient)
        return None
    total = torch.empty_like(own, device=gradient.device)
    stream.join(stream.copy(total, own))
    return stream.copy(own, total.add_(gradient))


@contextmanager
def borrowed_gradient(gradients: CollectedGradients, shard: str, *, dirty: bool) -> Iterator[torch.Tensor]:
    """A context manager that yields a collected gradient in host memory; ShardError if there is none."""
    if not gradients.has(shard):
        raise ShardError(f"'{shard}' has no gradient", tensor=shard)
    tensor, _ = gradients.borrow(shard)
    try:
        yield tensor
    finally:
        gradients.give_back(shard, dirty=dirty)


def known_shard(table: Mapping[str, _T], shard: str) -> _T:
    """Return ``table[shard]``; ShardError if the shard is not updated here."""
    if shard not in table:
        raise ShardError(f"no shard '{shard}' is updated here", tensor=shard)
    return table[shard]


def norm_squared(gradients: Sequence[torch.Tensor]) -> float:
    """Return the sum of squares of flat gradients; NaN and infinity propagate."""
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
