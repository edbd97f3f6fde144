"""Reads and writes of tensors in an accelerator's memory, through a ring of pinned host buffers: one chunk is copied
between device and host while others are read or written.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator
from concurrent import futures
from typing import Any

from ._file import File, require_offset
from ._request import Request
from .errors import InvalidBufferError, RequestCancelledError, WaitTimeoutError

__all__ = ["DeviceRequest", "DeviceTransfers"]

StartTransfer = Callable[[File, Any, int], Request]
"""`Engine.read` or `Engine.write`; takes the file, the host memory, and the offset in the file."""

CHUNK_BYTES = 8 << 20
SLOTS = 4


class DeviceRequest(Request):
    """A `Request` for a tensor of ``nbytes`` on an accelerator. The thread of that device's ring of staging buffers
    carries it out and sets ``future`` to the bytes moved or to the error; setting ``cancelled`` ends it early. The
    tensor is kept alive until the request has ended. `path`: of the file, for messages.
    """

    __slots__ = ("_cancelled", "_future", "_nbytes")

    def __init__(self, future: futures.Future[int], path: str, nbytes: int, cancelled: threading.Event) -> None:
        self._future = future
        self._path = path
        self._cancelled = cancelled
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes that the request moves in total."""
        return self._nbytes

    @property
    def checksum(self) -> str | None:
        """Return None: no checksum is computed for accelerator tensors."""
        return None

    def done(self) -> bool:
        """Return whether the request has ended, successfully or not; never blocks."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the tensor may be used again and return the bytes moved.

        `timeout` is in seconds (None: without end). Raises WaitTimeoutError if it passes first, RequestCancelledError
        after `cancel`, and the error of the read, write or copy that failed.
        """
        futures.wait([self._future], timeout)
        if not self._future.done():
            raise WaitTimeoutError(f"transfer of '{self._path}' is still under way after {timeout} s", path=self._path)
        return self._future.result()

    def settle(self, timeout: float | None = None) -> bool:
        """Block until the request has ended, successfully or not, for `timeout` seconds at most (None: without end);
        return whether it has ended. Does not raise the request's error.
        """
        futures.wait([self._future], timeout)
        return self._future.done()

    def cancel(self) -> None:
        """Start no further chunk of this request, which ends after the chunks under way.

        `wait` then raises RequestCancelledError, unless the request had ended before.
        """
        self._cancelled.set()

    def __repr__(self) -> str:
        return f"<DeviceRequest {self._nbytes} bytes of '{self._path}', {'done' if self.done() else 'under way'}>"

    def __await__(self) -> Generator[Any, None, int]:
        """Wait without blocking the event loop; the result and the errors are those of `wait`. Cancelling the task
        leaves the transfer running.
        """
        import asyncio

        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()


class DeviceTransfers:
    """Reads and writes accelerator tensors for one engine, whose `read` and `write` transfer the chunks.

    Each device has one ring of host buffers, made on first use.
    """

    def __init__(self, read: StartTransfer, write: StartTransfer) -> None:
        self._read, self._write = read, write
        self._rings: dict[Any, _StagingRing] = {}
        self._lock = threading.Lock()

    def submit(self, write: bool, file: File, tensor: Any, offset: int, checksum: bool) -> DeviceRequest:
        """Start to write a contiguous torch tensor at `offset` (bytes) of the file, or without `write` to read it from
        there; return the request.

        The transfer follows the work that is enqueued on the caller's current stream now. Raises InvalidBufferError for
        a tensor that is not contiguous and for `checksum`, which is not computed on accelerators, and
        InvalidOffsetError as `require_offset` does; errors of the transfer are raised by the request.
        """
        if checksum:
            raise InvalidBufferError("no checksum is computed for accelerator tensors; copy to host memory first")
        if not tensor.is_contiguous():
            raise InvalidBufferError("expected contiguous memory, got a strided tensor; call .contiguous() first")
        nbytes = tensor.numel() * tensor.element_size()
        require_offset(file.path, offset, nbytes)
        ring = self._ring_of(tensor.device)
        cancelled = threading.Event()
        ready = ring.copy_stream.record_callers_event()
        transfer = ring.write if write else ring.read
        start = self._write if write else self._read
        future = ring.executor.submit(transfer, start, file, tensor, offset, ready, cancelled)
        file.follow(future, write)
        return DeviceRequest(future, file.path, nbytes, cancelled)

    def close(self) -> None:
        """Wait until every request has ended, and end the threads; errors stay with their requests."""
        for ring in self._rings.values():
            ring.executor.shutdown(wait=True)

    def _ring_of(self, device: Any) -> _StagingRing:
        """Return the ring of host buffers of a device, made on first use; safe for several threads."""
        with self._lock:
            ring = self._rings.get(device)
            if ring is None:
                ring = self._rings[device] = _StagingRing(device)
            return ring


class _CopyStream:
    """A stream of one device that only copies. On the CPU there is none: copies have ended when their call returns, and
    all events are None.
    """

    def __init__(self, device: Any) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        self._stream = None if device.type == "cpu" else self._torch.Stream(device)

    def record_callers_event(self) -> Any:
        """Return an event that is reached when the work enqueued so far on the caller's current stream has ended; None
        on the CPU.
        """
        if self._stream is None:
            return None
        return self._torch.accelerator.current_stream(self._device).record_event()

    def wait_event(self, event: Any) -> None:
        """Have copies that are started later wait, on the device, for ``event``; do nothing if that is None."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def start_copy(self, target: Any, source: Any) -> Any:
        """Start copying `source` to `target`, tensors of equal size; return an event that is reached when the copy has
        ended, or None if it already has. Until then neither tensor may be written to.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class _StagingRing:
    """Four pinned host buffers of 8 MiB for one device, kept until the engine is dropped. The one thread of `executor`
    copies through them, on `copy_stream`, for one request at a time.
    """

    def __init__(self, device: Any) -> None:
        torch: Any = importlib.import_module("torch")
        self.copy_stream = _CopyStream(device)
        self.executor = futures.ThreadPoolExecutor(1, thread_name_prefix="zero-nvme-aio-device")
        self._slots = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in range(SLOTS)
        ]
        self._flat_bytes: Callable[[Any], Any] = lambda tensor: tensor.detach().reshape(-1).view(torch.uint8)

    def write(
        self, start: StartTransfer, file: File, tensor: Any, offset: int, ready: Any, cancelled: threading.Event
    ) -> int:
        """Write ``tensor`` at ``offset`` of the file, chunk by chunk, and return its bytes; runs on the ring's thread.

        ``start``: starts the write of a chunk. ``ready``: the event to wait for before the first copy, or None. Raises
        RequestCancelledError if ``cancelled`` was set meanwhile, and the error of a write.
        """
        flat = self._flat_bytes(tensor)
        pending: list[Request | None] = [None] * SLOTS
        self.copy_stream.wait_event(ready)
        try:
            for number, begin in enumerate(range(0, len(flat), CHUNK_BYTES)):
                slot = number % SLOTS
                self._wait_for_slot(pending, slot)
                if cancelled.is_set():
                    break
                piece = self._slots[slot][: min(CHUNK_BYTES, len(flat) - begin)]
                copied = self.copy_stream.start_copy(piece, flat[begin : begin + len(piece)])
                if copied is not None:
                    copied.synchronize()
                pending[slot] = start(file, piece, offset + begin)
        finally:
            _settle_all(pending)
        return self._finish(pending, len(flat), file, cancelled)

    def read(
        self, start: StartTransfer, file: File, tensor: Any, offset: int, ready: Any, cancelled: threading.Event
    ) -> int:
        """Fill ``tensor`` from ``offset`` of the file, chunk by chunk, and return its bytes; runs on the ring's thread.

        ``start``: starts the read of a chunk. ``ready``: the event to wait for before the first copy, or None. All
        copies to the device have ended on return. Raises RequestCancelledError if ``cancelled`` was set meanwhile, and
        the error of a read; part of the tensor is then written.
        """
        flat = self._flat_bytes(tensor)
        begins = range(0, len(flat), CHUNK_BYTES)
        pending: list[Request | None] = [None] * SLOTS
        copied: list[Any] = [None] * SLOTS
        self.copy_stream.wait_event(ready)
        try:
            for number in range(len(begins) + SLOTS - 1):
                if number < len(begins) and not cancelled.is_set():
                    slot = number % SLOTS
                    if copied[slot] is not None:
                        copied[slot].synchronize()
                    length = min(CHUNK_BYTES, len(flat) - begins[number])
                    pending[slot] = start(file, self._slots[slot][:length], offset + begins[number])
                oldest = number - (SLOTS - 1)
                if 0 <= oldest < len(begins):
                    slot = oldest % SLOTS
                    self._wait_for_slot(pending, slot)
                    target = flat[begins[oldest] : begins[oldest] + CHUNK_BYTES]
                    copied[slot] = self.copy_stream.start_copy(target, self._slots[slot][: len(target)])
        finally:
            _settle_all(pending)
            for event in copied:
                if event is not None:
                    event.synchronize()
        return self._finish(pending, len(flat), file, cancelled)

    def _wait_for_slot(self, pending: list[Request | None], slot: int) -> None:
        """Wait for the transfer in ``pending`` at index ``slot``, which uses the staging buffer of that number, and
        replace it by None; raise the transfer's error. Do nothing if it is None.
        """
        request, pending[slot] = pending[slot], None
        if request is not None:
            request.wait()

    def _finish(self, pending: list[Request | None], nbytes: int, file: File, cancelled: threading.Event) -> int:
        """Wait for all transfers in ``pending``, raising the first error, and return ``nbytes`` as it is;
        RequestCancelledError, naming the file, if ``cancelled`` is set.
        """
        for slot in range(SLOTS):
            self._wait_for_slot(pending, slot)
        if cancelled.is_set():
            raise RequestCancelledError(f"transfer of '{file.path}' was cancelled", path=file.path)
        return nbytes


def _settle_all(pending: list[Request | None]) -> None:
    """Wait until all transfers in ``pending`` have ended, without raising their errors: the next request reuses the
    buffers.
    """
    for request in pending:
        if request is not None:
            request.settle()
