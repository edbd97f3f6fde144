"""Moves saved activations to host memory or to files, and back. The handle of a saved tensor is what the tier finds it
by: its block of host memory, or the name of its extent (a named range of bytes in files).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from ._copy_streams import CopyStream
from ._extents import aligned_buffer, naming, open_extents
from ._memory import PAGE, HostBlock, page_rounded
from ._protocols import Request
from .ends import HostUse
from .swap_paths import SwapPaths
from .trace import Trace

__all__ = ["ActivationTier", "FiledActivations", "HostActivations", "TensorForm"]

_PIECE_BYTES = 16 << 20  # of a tensor that is copied at a time, so that a copy never needs the tensor's size again


class TensorForm(NamedTuple):
    """Shape, strides, dtype and device of a tensor; the strides are dense."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorForm:
        """Return the form of a tensor. If the tensor has gaps or overlaps, its strides are replaced by dense ones with
        the dimensions in the same order.
        """
        stride = torch.empty_like(tensor, device="meta").stride()
        return TensorForm(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a tensor of this form."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this shape, these strides and dtype over the first bytes of ``memory`` (1-D, uint8), which
        it shares; its device is that of the memory.
        """
        return memory[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)

    def pieces(self, tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield the elements of ``tensor``, whose form this is, in the order in which a dense tensor of this form has
        them in memory, as 1-D pieces of ``nbytes`` or less (of one element if that is larger).

        The pieces of a dense tensor are views, all but the last of the same size; those of another are copies.
        """
        count = max(1, nbytes // self.dtype.itemsize)
        if tuple(tensor.stride()) == self.stride:
            yield from torch.split(tensor.as_strided((tensor.numel(),), (1,)), count)
            return
        outermost_first = sorted(range(tensor.dim()), key=lambda dim: -self.stride[dim])
        yield from _flat_pieces(tensor.permute(outermost_first), count)

    def empty(self) -> torch.Tensor:
        """Return a new tensor of this form, on its device, with arbitrary content."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _flat_pieces(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Yield the elements of ``tensor`` in row-major order, in 1-D copies of ``count`` elements or fewer."""
    if tensor.numel() <= count:
        yield tensor.flatten()
    elif tensor.size(0) == 1:
        yield from _flat_pieces(tensor[0], count)
    else:
        half = tensor.size(0) // 2
        yield from _flat_pieces(tensor[:half], count)
        yield from _flat_pieces(tensor[half:], count)


class ActivationTier(Protocol):
    """Keeps tensors that autograd saved until backward uses them. Call order for each: `save` once; then `start` and
    `finish`, any number of times; `free` when it will not be needed again. ``form`` is the tensor's in all calls.
    """

    def save(self, tensor: torch.Tensor, form: TensorForm) -> Any:
        """Start copying a tensor to the tier; return its handle, for `start` and `free`. The tensor may be freed at
        once, but must not be written until the copy has ended, at the latest after `flush`.
        """

    def start(self, handle: Any, form: TensorForm) -> Any:
        """Start bringing the saved tensor of ``handle`` back to its device, in new memory; return what `finish` takes,
        once.
        """

    def finish(self, started: Any) -> torch.Tensor:
        """Return the tensor whose way back `start` began, ready for use on the current stream; ``started`` is what
        `start` returned. Raises the error of a failed read.
        """

    def free(self, handle: Any) -> None:
        """Let another tensor use the memory or file space of a saved tensor; what `finish` returned stays valid."""

    def flush(self) -> None:
        """Block until every saved tensor has arrived on the tier; raise the first write that failed."""

    def memory(self) -> dict[str, int]:
        """Return the bytes held now by tier, ``host`` and ``nvme``, including those that are free for reuse."""

    def close(self) -> None:
        """Free all memory that is free for reuse, and from now on what `free` gives back; remove the files. No `save`
        may follow.
        """


class HostActivations:
    """An `ActivationTier` in host memory, pinned unless the ``device`` of the tensors is the CPU; copies run on a
    stream beside compute, and ``trace``, if not None, records them. Freed blocks are reused for tensors of equal size,
    and count in `memory` until `close`; a block that is freed later is dropped.
    """

    def __init__(self, device: torch.device, trace: Trace | None) -> None:
        self._copy_stream = CopyStream(device, trace, "activations, device")
        self._pin = device.type != "cpu"
        self._free: dict[int, list[HostBlock]] = {}
        self._kept_bytes = 0
        self._closed = False

    def save(self, tensor: torch.Tensor, form: TensorForm) -> HostBlock:
        """Start copying a tensor to a free block of its size, or to a new one; return the block, the tensor's handle.
        The tensor may be freed at once.
        """
        waiting = self._free.get(form.nbytes)
        if waiting:
            block = waiting.pop()
        else:
            block = HostBlock(form.nbytes, HostUse("offloaded activations", pin=self._pin))
            self._kept_bytes += form.nbytes
        flat, begin = block.tensor[: form.nbytes].view(form.dtype), 0
        for piece in form.pieces(tensor, _PIECE_BYTES):
            self._copy_stream.copy(flat[begin : begin + piece.numel()], piece)
            begin += piece.numel()
        return block

    def start(self, handle: HostBlock, form: TensorForm) -> tuple[torch.Tensor, torch.Event | None]:
        """Start copying the saved tensor in the block ``handle`` to a new one on its device; return that tensor and the
        copy's event (None on the CPU).
        """
        target = form.empty()
        return target, self._copy_stream.copy(target, form.over(handle.tensor))

    def finish(self, started: tuple[torch.Tensor, torch.Event | None]) -> torch.Tensor:
        """Return the tensor that `start` made; work on the current stream waits for its copy, the host does not."""
        self._copy_stream.join(started[1])
        return started[0]

    def free(self, handle: HostBlock) -> None:
        """Keep the block ``handle`` for another tensor of its size; after `close` drop it, once the copies from it have
        ended.
        """
        if self._closed:
            self.flush()
            self._kept_bytes -= handle.nbytes
            return
        # Copies run in order on one stream, so the block's next content follows its last reading.
        self._free.setdefault(handle.nbytes, []).append(handle)

    def flush(self) -> None:
        """Block until all copies to and from the host have ended."""
        self._copy_stream.synchronize()

    def memory(self) -> dict[str, int]:
        """Return the bytes of all blocks as ``host``, including those that are free for reuse; ``nvme`` is 0."""
        return {"host": self._kept_bytes, "nvme": 0}

    def close(self) -> None:
        """Drop the blocks that are free for reuse, once the copies from them have ended; those of saved tensors live
        until these are freed.
        """
        self._closed = True
        self.flush()
        self._kept_bytes -= sum(nbytes * len(blocks) for nbytes, blocks in self._free.items())
        self._free.clear()


class FiledActivations:
    """An `ActivationTier` in files under ``paths`` for tensors of ``device``. Tensors are written in pieces, so buffers
    being written hold at most ``in_flight_bytes``, or a page if that is more; `save` waits for room. Freed extents are
    reused for tensors of equal size.

    `memory` counts as ``host`` the buffers being written, not those being read, and as ``nvme`` the bytes in files,
    also those that are free for reuse. ``checksums`` are recorded as data is written, ``verify`` compares them on every
    read; ``prefix`` begins the file names; ``engine``: a ``zero_nvme_aio.Engine`` to share, None for one of its own.
    ``trace``, if not None, records the transfers. The constructor opens the files (OffloadError if it cannot), `close`
    removes them.
    """

    def __init__(
        self,
        device: torch.device,
        paths: SwapPaths,
        *,
        in_flight_bytes: int,
        checksums: bool,
        verify: bool,
        prefix: str,
        engine: Any,
        trace: Trace | None,
    ) -> None:
        self._copy_stream = CopyStream(device, trace, "activations, device")
        self._trace = trace
        self._on_cpu = device.type == "cpu"
        self._limit = in_flight_bytes
        self._piece_bytes = max(PAGE, min(_PIECE_BYTES, in_flight_bytes) // PAGE * PAGE)
        self._store = open_extents(paths, prefix=prefix, checksums=checksums, verify=verify, engine=engine)
        self._writing: deque[tuple[str, Request, torch.Tensor]] = deque()
        self._writing_bytes = 0
        self._free: dict[int, list[str]] = {}
        self._count = 0
        self._file_bytes = 0
        self._closed = False

    def save(self, tensor: torch.Tensor, form: TensorForm) -> str:
        """Copy a tensor, piece by piece, to buffers and start writing those to a free extent of its size, or to a new
        one; return the extent's name, the tensor's handle. Waits for the copies, and for earlier writes while
        ``in_flight_bytes`` are under way; ShardError if one of those failed.
        """
        waiting = self._free.get(form.nbytes)
        name = waiting.pop() if waiting else self._new_name(form)
        begin = 0
        for piece in form.pieces(tensor, self._piece_bytes):
            self._write(name, piece, begin)
            begin += piece.numel() * piece.element_size()
        while self._writing and self._writing[0][1].done():
            self._finish_oldest_write()
        return name

    def _write(self, name: str, piece: torch.Tensor, offset_bytes: int) -> None:
        """Start writing a 1-D piece of a tensor at an offset of the extent ``name``. Waits and fails as `save` does."""
        nbytes = piece.numel() * piece.element_size()
        while self._writing and self._writing_bytes + page_rounded(nbytes) > self._limit:
            self._finish_oldest_write()
        buffer = aligned_buffer(page_rounded(nbytes), HostUse("buffers of activations"))
        event = self._copy_stream.copy(buffer[:nbytes].view(piece.dtype), piece)
        if event is not None:
            event.synchronize()
        with naming(name, "write"):
            request = self._store.write(name, buffer[:nbytes], offset_bytes)
        self._trace_transfer("activations out", name, nbytes, request)
        self._writing.append((name, request, buffer))
        self._writing_bytes += buffer.numel()

    def start(self, handle: str, form: TensorForm) -> tuple[str, Request, torch.Tensor, TensorForm]:
        """Start reading the saved tensor in the extent ``handle`` into new host memory; return (handle, request, that
        memory as uint8, form), for `finish`.
        """
        flat = torch.empty(form.nbytes, dtype=torch.uint8)
        with naming(handle, "read"):
            request = self._store.read(handle, flat)
        self._trace_transfer("activations in", handle, form.nbytes, request)
        return handle, request, flat, form

    def finish(self, started: tuple[str, Request, torch.Tensor, TensorForm]) -> torch.Tensor:
        """Wait until the tensor is read and return it on its device, copied there unless that is the CPU; ShardError,
        naming the extent, if it cannot be read.
        """
        handle, request, flat, form = started
        with naming(handle, "read"), self._trace_wait("activations in", handle, request):
            request.wait()
        if self._on_cpu:
            return form.over(flat)
        target = form.empty()
        target.copy_(form.over(flat))
        return target

    def free(self, handle: str) -> None:
        """Keep the extent ``handle`` for another tensor of the same size; do nothing after `close`."""
        if not self._closed:
            self._free.setdefault(int(handle.rpartition("x")[2]), []).append(handle)

    def flush(self) -> None:
        """Block until all writes to files have ended, or one has failed, whose ShardError is raised."""
        while self._writing:
            self._finish_oldest_write()

    def memory(self) -> dict[str, int]:
        """Return the bytes of buffers being written as ``host`` (buffers being read do not count), and the bytes of all
        extents, also free ones, as ``nvme``.
        """
        return {"host": self._writing_bytes, "nvme": self._file_bytes}

    def close(self) -> None:
        """Wait for transfers under way, remove the files and drop the buffers being written."""
        self._closed = True
        self._store.close(remove=True)
        self._writing.clear()
        self._free.clear()
        self._writing_bytes = self._file_bytes = 0

    def _new_name(self, form: TensorForm) -> str:
        """Declare a new extent for a tensor of this form and return its name, which ends with "x" and its number of
        bytes, where `free` finds it.
        """
        self._count += 1
        self._file_bytes += form.nbytes
        name = f"activation {self._count} of {'x'.join(map(str, form.shape))} {form.dtype} bytes x{form.nbytes}"
        self._store.declare(name, form.nbytes)
        return name

    def _finish_oldest_write(self) -> None:
        """Wait for the oldest write and free its buffer; ShardError if the write failed."""
        name, request, buffer = self._writing.popleft()
        self._writing_bytes -= buffer.numel()
        with naming(name, "write"), self._trace_wait("activations out", name, request):
            request.wait()

    def _trace_transfer(self, hop: str, name: str, nbytes: int, request: Request) -> None:
        """Record a transfer until it ends, if there is a trace. ``hop``: its kind, "activations in" or "activations
        out".
        """
        if self._trace is not None:
            self._trace.follow(hop, name, nbytes, request.wait)

    def _trace_wait(self, hop: str, name: str, request: Request) -> AbstractContextManager[None]:
        """Return a context manager that records the wait for a request; one that does nothing if the request has ended
        or there is no trace.
        """
        if self._trace is None or request.done():
            return nullcontext()
        return self._trace.span(hop, name, waiting=True)
