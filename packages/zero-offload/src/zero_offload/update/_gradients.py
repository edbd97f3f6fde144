"""Gradients between backward and the step: with the caller or in host memory."""

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
from .plans import KERNEL_DTYPES, ShardPlan, checked

__all__ = [
    "CallerGradients",
    "Collected",
    "Gradients",
    "HOP",
    "HostGradients",
    "copy_to_host",
    "gradient_bytes",
    "known_shard",
    "looked_at",
    "norm_squared",
]

HOP = "gradients"
_T = TypeVar("_T")


class Gradients(Protocol):
    """The gradients that the step reads: `prefetch` a slice (optional), `acquire` it, use it, `release` it."""

    def has(self, shard: str) -> bool:
        """Return whether the shard has a gradient."""

    def prefetch(self, index: int) -> None:
        """A slice will be acquired soon."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        """The gradient of each span of a slice, wherever it is; None for shards without one."""

    def release(self, index: int) -> None:
        """The slice was used."""

    def abort(self) -> None:
        """The step failed: forget what was acquired."""

    def clear(self) -> None:
        """Forget all gradients."""

    def memory(self) -> dict[str, int]:
        """Bytes by what holds them: ``gradients`` in host memory, ``nvme`` in files."""

    def bytes_written(self) -> int:
        """Bytes written to drives so far."""

    def flush(self) -> None:
        """Return when everything taken has arrived."""

    def close(self) -> None:
        """Let everything go."""


class Collected(Gradients, Protocol):
    """Gradients that are handed over during backward and add up."""

    def borrow(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Host memory for a shard's gradient, and whether it holds the sum so far (else its content is arbitrary)."""

    def give_back(self, shard: str, *, dirty: bool) -> None:
        """The borrower is done; with ``dirty`` it wrote the gradient."""

    def add(self, shard: str, gradient: torch.Tensor) -> None:
        """Add a gradient of the shard's size from any device to the sum; the tensor may be freed at once."""


class CallerGradients:
    """Gradients that the caller keeps: for each step it says where they are."""

    def __init__(self, shards: Sequence[ShardPlan], slices: Sequence[Slice]) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._slices = slices
        self._given: Mapping[str, torch.Tensor] = {}

    def give(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """The gradients (1-D, of the whole shard) of the step that follows; shards not in it have none."""
        for name, gradient in gradients.items():
            shard = known_shard(self._shards, name)
            checked(gradient, shard, shard.grad_dtype, "a gradient")
        self._given = gradients

    def has(self, shard: str) -> bool:
        return shard in self._given

    def prefetch(self, index: int) -> None:
        """Nothing to do."""

    def acquire(self, index: int) -> list[FlatSpan | None]:
        given = [self._given.get(span.fragment.shard.name) for span in self._slices[index]]
        return [None if g is None else s.of_shard(g) for s, g in zip(self._slices[index], given, strict=True)]

    def release(self, index: int) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        self._given = {}

    def clear(self) -> None:
        self._given = {}

    def memory(self) -> dict[str, int]:
        return {"gradients": 0, "nvme": 0}

    def bytes_written(self) -> int:
        return 0

    def flush(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self._given = {}


def gradient_bytes(shards: Sequence[ShardPlan]) -> int:
    """Bytes of all gradients."""
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
        self._settle(shard)
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
            self._settle(shard)
            found.append(span.of_shard(self._views[shard]) if shard in self._present else None)
        return found

    def release(self, index: int) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        """Nothing was taken."""

    def clear(self) -> None:
        self._present.clear()

    def memory(self) -> dict[str, int]:
        return {"gradients": self._block.nbytes, "nvme": 0}

    def bytes_written(self) -> int:
        return 0

    def flush(self) -> None:
        for shard in list(self._arriving):
            self._settle(shard)

    def close(self) -> None:
        self.flush()
        self._views.clear()
        self._block = HostBlock(0, HostUse("nothing"))

    def _settle(self, shard: str) -> None:
        event = self._arriving.pop(shard, None)
        if event is not None:
            event.synchronize()


def copy_to_host(stream: CopyStream, own: torch.Tensor, gradient: torch.Tensor, *, again: bool) -> torch.Event | None:
    """Start writing a gradient to host memory, or with ``again`` adding it to what is there; None when it is done.

    Adding happens where the gradient is, so that nobody waits for the device.
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
def looked_at(gradients: Collected, shard: str, *, dirty: bool) -> Iterator[torch.Tensor]:
    """A collected gradient in host memory; ShardError when there is none."""
    if not gradients.has(shard):
        raise ShardError(f"'{shard}' has no gradient", tensor=shard)
    tensor, _ = gradients.borrow(shard)
    try:
        yield tensor
    finally:
        gradients.give_back(shard, dirty=dirty)


def known_shard(table: Mapping[str, _T], shard: str) -> _T:
    """Return what a table has for a shard; ShardError names one that is not updated here."""
    if shard not in table:
        raise ShardError(f"no shard '{shard}' is updated here", tensor=shard)
    return table[shard]


def norm_squared(gradients: Sequence[torch.Tensor]) -> float:
    """Return the sum of squares of flat gradients, in float64; NaN and infinity stay what they are."""
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
