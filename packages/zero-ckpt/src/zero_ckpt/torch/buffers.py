"""Tensors as buffers, without a copy where memory allows it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ..dry_run import current_dry_run
from ..errors import CheckpointError
from ..types import Interval

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_STAGING_BYTES = 64 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a checkpoint stores a torch dtype. Raises CheckpointError for one that cannot be
    stored."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{dtype} cannot be stored; expected one of {', '.join(str(known) for known in _NAMES)}")
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of `name`, a key of `ITEMSIZE`."""
    return _DTYPES[name]


def tensor_buffer(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as a flat, writable view of its bytes, which keeps the tensor alive.

    In a dry run (see `zero_ckpt.dry_run`) it is a view of zeros instead, not to be written. Raises CheckpointError for
    a tensor on another device or with strides.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CheckpointError(f"a buffer needs a contiguous CPU tensor, got {tensor.device} with {tensor.stride()}")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    dry_run = current_dry_run()
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr() if dry_run is None else dry_run.address(nbytes))
    memory.owner = tensor.detach(), dry_run  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


class Stager:
    """Turns tensors into intervals. CPU memory is used as it is; other memory is copied through one staging buffer,
    which is reused, and pinned where that is possible."""

    def __init__(self) -> None:
        self._staging: torch.Tensor | None = None
        self._stream: torch.Stream | None = None
        self._marks: dict[torch.device, torch.Event | None] = {}

    def mark(self, device: torch.device) -> None:
        """Note the work that this thread has queued on `device` so far. Later reads of tensors on it that were given to
        `intervals` with `stays` wait for this work and for nothing later, on whatever thread they run."""
        self._marks[device] = _record_event(device)

    def intervals(
        self,
        name: str,
        kind: str,
        tensor: torch.Tensor,
        *,
        shape: Sequence[int] | None = None,
        offset: int = 0,
        stays: bool = False,
    ) -> Iterator[Interval]:
        """Yield intervals for `tensor`, in C order. They are elements `offset` on of the tensor (`name`, `kind`) of the
        checkpoint, which has this `shape`; None: `tensor` is all of it.

        Nothing is copied until an interval is written; what is not contiguous CPU memory comes in intervals of up to 64
        MiB, one of which is in memory at a time. `stays`: nobody writes `tensor` before `AsyncSaver.copied` returns;
        its version counter becomes the interval's `version`. Raises CheckpointError for a dtype that cannot be stored.
        """
        version = partial(getattr, tensor, "_version") if stays and not tensor.is_inference() else None
        tensor = tensor.detach()
        dtype, whole = dtype_name(tensor.dtype), tuple(tensor.shape if shape is None else shape)
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            yield Interval(name, kind, whole, dtype, offset, tensor_buffer(tensor), version=version)
            return
        flat = tensor.reshape(-1)
        step = _STAGING_BYTES // tensor.element_size()
        ready = (self._marks.get(flat.device) or _record_event(flat.device)) if stays else None
        for begin in range(0, max(flat.numel(), 1), step):
            part = flat[begin : begin + step]
            staged = partial(self._copy_to_staging, part, ready)
            yield Interval(name, kind, whole, dtype, offset + begin, staged, part.numel(), version)

    def _copy_to_staging(self, part: torch.Tensor, ready: torch.Event | None) -> memoryview:
        """Copy `part`, a flat tensor of up to 64 MiB, into the staging buffer and return its bytes there, which the
        next call overwrites.

        With an event `ready` the copy runs after it, on a stream of its own, and does not wait for later work of the
        device.
        """
        if self._staging is None:
            pin = part.device.type != "cpu" and torch.accelerator.is_available()
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=pin)
        staged = self._staging[: part.numel() * part.element_size()]
        if ready is None:
            staged.copy_(part.view(torch.uint8))
            return tensor_buffer(staged)
        if self._stream is None:
            self._stream = torch.Stream(device=part.device)
        self._stream.wait_event(ready)
        with self._stream:
            staged.copy_(part.view(torch.uint8), non_blocking=True)
        self._stream.synchronize()
        return tensor_buffer(staged)


def _record_event(device: torch.device) -> torch.Event | None:
    """Return an event that is complete after the work now queued on the device's current stream; None for the CPU."""
    if device.type == "cpu":
        return None
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))
    return event
