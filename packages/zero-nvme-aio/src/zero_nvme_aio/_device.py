"""Tensors in an accelerator's memory: through a ring of pinned host buffers, copying one chunk while another is
moved.
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

Move = Callable[[File, Any, int], Request]
"""`Engine.read` or `Engine.write`: file, host memory, offset."""

CHUNK_BYTES = 8 << 20
SLOTS = 4


class DeviceRequest(Request):
    """A transfer of an accelerator tensor."""

    __slots__ = ("_cancelled", "_future", "_nbytes")

    def __init__(self, future: futures.Future[int], path: str, nbytes: int, cancelled: threading.Event) -> None:
        self._future = future
        self._path = path
        self._cancelled = cancelled
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that the request moves in total."""
        return self._nbytes

    @property
    def checksum(self) -> str | None:
        """None: no checksum is computed for accelerator tensors."""
        return None

    def done(self) -> bool:
        """Return whether the request has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until the tensor may be used again and returns the bytes moved; `timeout` in seconds."""
        futures.wait([self._future], timeout)
        if not self._future.done():
            raise WaitTimeoutError(f"transfer of '{self._path}' is still under way after {timeout} s", path=self._path)
        return self._future.result()

    def settle(self) -> None:
        """Blocks until the request has ended, well or not."""
        self._future.exception()

    def cancel(self) -> None:
        """Starts no further chunk."""
        self._cancelled.set()

    def __repr__(self) -> str:
        return f"<DeviceRequest {self._nbytes} bytes of '{self._path}', {'done' if self.done() else 'under way'}>"

    def __await__(self) -> Generator[Any, None, int]:
        import asyncio

        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()


class DeviceTransfers:
    """Moves accelerator tensors for one engine, whose ``read`` and ``write`` move the chunks; one ring per device."""

    def __init__(self, read: Move, write: Move) -> None:
        self._read, self._write = read, write
        self._stages: dict[Any, _Stage] = {}
        self._lock = threading.Lock()

    def submit(self, write: bool, file: File, tensor: Any, offset: int, checksum: bool) -> DeviceRequest:
        """Starts moving a contiguous torch tensor between its device and the file."""
        if checksum:
            raise InvalidBufferError("no checksum is computed for accelerator tensors; copy to host memory first")
        if not tensor.is_contiguous():
            raise InvalidBufferError("expected contiguous memory, got a strided tensor; call .contiguous() first")
        nbytes = tensor.numel() * tensor.element_size()
        require_offset(file.path, offset, nbytes)
        stage = self._stage_of(tensor.device)
        cancelled = threading.Event()
        ready = stage.mover.mark()
        move = stage.write if write else stage.read
        io = self._write if write else self._read
        future = stage.executor.submit(move, io, file, tensor, offset, ready, cancelled)
        return DeviceRequest(future, file.path, nbytes, cancelled)

    def close(self) -> None:
        """Waits for everything submitted."""
        for stage in self._stages.values():
            stage.executor.shutdown(wait=True)

    def _stage_of(self, device: Any) -> _Stage:
        with self._lock:
            stage = self._stages.get(device)
            if stage is None:
                stage = self._stages[device] = _Stage(device)
            return stage


class _Mover:
    """Copies on a stream of the device, beside the user's own."""

    def __init__(self, device: Any) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        self._stream = None if device.type == "cpu" else self._torch.Stream(device)

    def mark(self) -> Any:
        """The point in the caller's stream up to which the tensor is being made."""
        if self._stream is None:
            return None
        return self._torch.accelerator.current_stream(self._device).record_event()

    def after(self, event: Any) -> None:
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def copy(self, target: Any, source: Any) -> Any:
        """Starts a copy and returns the event that ends it."""
        if self._stream is None:
            target.copy_(source)
            return None
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class _Stage:
    """The pinned ring of one device, worked by one thread."""

    def __init__(self, device: Any) -> None:
        torch: Any = importlib.import_module("torch")
        self.mover = _Mover(device)
        self.executor = futures.ThreadPoolExecutor(1, thread_name_prefix="zero-nvme-aio-device")
        self._slots = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in range(SLOTS)
        ]
        self._flat: Callable[[Any], Any] = lambda tensor: tensor.detach().reshape(-1).view(torch.uint8)

    def write(self, io: Move, file: File, tensor: Any, offset: int, ready: Any, cancelled: threading.Event) -> int:
        flat = self._flat(tensor)
        pending: list[Request | None] = [None] * SLOTS
        self.mover.after(ready)
        try:
            for number, begin in enumerate(range(0, len(flat), CHUNK_BYTES)):
                slot = number % SLOTS
                self._free(pending, slot)
                if cancelled.is_set():
                    break
                piece = self._slots[slot][: min(CHUNK_BYTES, len(flat) - begin)]
                copied = self.mover.copy(piece, flat[begin : begin + len(piece)])
                if copied is not None:
                    copied.synchronize()
                pending[slot] = io(file, piece, offset + begin)
        finally:
            _settle(pending)
        return self._finish(pending, len(flat), file, cancelled)

    def read(self, io: Move, file: File, tensor: Any, offset: int, ready: Any, cancelled: threading.Event) -> int:
        flat = self._flat(tensor)
        begins = range(0, len(flat), CHUNK_BYTES)
        pending: list[Request | None] = [None] * SLOTS
        copied: list[Any] = [None] * SLOTS
        self.mover.after(ready)
        try:
            for number in range(len(begins) + SLOTS - 1):
                if number < len(begins) and not cancelled.is_set():
                    slot = number % SLOTS
                    if copied[slot] is not None:
                        copied[slot].synchronize()
                    length = min(CHUNK_BYTES, len(flat) - begins[number])
                    pending[slot] = io(file, self._slots[slot][:length], offset + begins[number])
                oldest = number - (SLOTS - 1)
                if 0 <= oldest < len(begins):
                    slot = oldest % SLOTS
                    self._free(pending, slot)
                    target = flat[begins[oldest] : begins[oldest] + CHUNK_BYTES]
                    copied[slot] = self.mover.copy(target, self._slots[slot][: len(target)])
        finally:
            _settle(pending)
            for event in copied:
                if event is not None:
                    event.synchronize()
        return self._finish(pending, len(flat), file, cancelled)

    def _free(self, pending: list[Request | None], slot: int) -> None:
        request, pending[slot] = pending[slot], None
        if request is not None:
            request.wait()

    def _finish(self, pending: list[Request | None], nbytes: int, file: File, cancelled: threading.Event) -> int:
        for slot in range(SLOTS):
            self._free(pending, slot)
        if cancelled.is_set():
            raise RequestCancelledError(f"transfer of '{file.path}' was cancelled", path=file.path)
        return nbytes


def _settle(pending: list[Request | None]) -> None:
    """The ring is reused by the next transfer: nothing of this one may still be under way, after an error either."""
    for request in pending:
        if request is not None:
            request.settle()
