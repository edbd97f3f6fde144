"""Bring a saved activation to the host or to files, and back."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from ._copy_streams import CopyStream
from ._extents import aligned_buffer, naming, open_extents
from ._memory import HostBlock, page_rounded
from ._protocols import Request
from .ends import HostUse
from .trace import Trace

__all__ = ["ActivationTier", "FiledActivations", "Form", "HostActivations"]


class Form(NamedTuple):
    """The form of a tensor in memory; ``stride`` is dense."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """The form of a tensor, with its strides where they are dense, else those of a contiguous one."""
        stride = torch.empty_like(tensor, device="meta").stride()
        return Form(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """A tensor of this form over the first bytes of ``memory`` (uint8)."""
        return memory[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)

    def empty(self) -> torch.Tensor:
        """A new tensor of this form, on its device."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class ActivationTier(Protocol):
    """`save` once; then `start` and `finish`, as often as wanted; `free` when nobody will ask again."""

    def save(self, tensor: torch.Tensor, form: Form) -> Any:
        """Take a copy away; returns where it is."""

    def start(self, place: Any, form: Form) -> Any:
        """Start bringing it back."""

    def finish(self, started: Any) -> torch.Tensor:
        """The tensor that was started."""

    def free(self, place: Any) -> None:
        """The copy is not needed any more."""

    def flush(self) -> None:
        """Block until what was saved is where it belongs."""

    def memory(self) -> dict[str, int]:
        """Bytes by tier: what is kept now."""

    def close(self) -> None:
        """Let everything go."""


class HostActivations:
    """To host memory and back on a stream beside compute. Blocks of equal size are used again."""

    def __init__(self, device: torch.device, trace: Trace | None) -> None:
        self._copy_stream = CopyStream(device, trace, "activations, device")
        self._pin = device.type != "cpu"
        self._free: dict[int, list[HostBlock]] = {}
        self._kept_bytes = 0

    def save(self, tensor: torch.Tensor, form: Form) -> HostBlock:
        waiting = self._free.get(form.nbytes)
        if waiting:
            block = waiting.pop()
        else:
            block = HostBlock(form.nbytes, HostUse("offloaded activations", pin=self._pin))
            self._kept_bytes += form.nbytes
        self._copy_stream.copy(form.over(block.tensor), tensor)
        return block

    def start(self, place: HostBlock, form: Form) -> tuple[torch.Tensor, torch.Event | None]:
        target = form.empty()
        return target, self._copy_stream.copy(target, form.over(place.tensor))

    def finish(self, started: tuple[torch.Tensor, torch.Event | None]) -> torch.Tensor:
        self._copy_stream.join(started[1])
        return started[0]

    def free(self, place: HostBlock) -> None:
        # Copies run in order on one stream, so the block's next content follows its last reading.
        self._free.setdefault(place.nbytes, []).append(place)

    def flush(self) -> None:
        self._copy_stream.synchronize()

    def memory(self) -> dict[str, int]:
        return {"host": self._kept_bytes, "nvme": 0}

    def close(self) -> None:
        self._free.clear()


class FiledActivations:
    """To files and back through buffers that are on their way; at most ``in_flight_bytes`` of them, or one."""

    def __init__(
        self,
        device: torch.device,
        paths: list[str],
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
        self._store = open_extents(paths, prefix=prefix, checksums=checksums, verify=verify, engine=engine)
        self._writing: deque[tuple[str, Request, torch.Tensor]] = deque()
        self._writing_bytes = 0
        self._free: dict[int, list[str]] = {}
        self._count = 0
        self._file_bytes = 0

    def save(self, tensor: torch.Tensor, form: Form) -> str:
        waiting = self._free.get(form.nbytes)
        name = waiting.pop() if waiting else self._new_name(form)
        while self._writing and self._writing_bytes + page_rounded(form.nbytes) > self._limit:
            self._oldest()
        buffer = aligned_buffer(page_rounded(form.nbytes), HostUse("buffers of activations"))
        event = self._copy_stream.copy(form.over(buffer), tensor)
        if event is not None:
            event.synchronize()
        with naming(name, "write"):
            request = self._store.write(name, buffer[: form.nbytes])
        self._follow("activations out", name, form, request)
        self._writing.append((name, request, buffer))
        self._writing_bytes += buffer.numel()
        while self._writing and self._writing[0][1].done():
            self._oldest()
        return name

    def start(self, place: str, form: Form) -> tuple[str, Request, torch.Tensor, Form]:
        flat = torch.empty(form.nbytes, dtype=torch.uint8)
        with naming(place, "read"):
            request = self._store.read(place, flat)
        self._follow("activations in", place, form, request)
        return place, request, flat, form

    def finish(self, started: tuple[str, Request, torch.Tensor, Form]) -> torch.Tensor:
        place, request, flat, form = started
        with naming(place, "read"), self._waiting("activations in", place, request):
            request.wait()
        if self._on_cpu:
            return form.over(flat)
        target = form.empty()
        target.copy_(form.over(flat))
        return target

    def free(self, place: str) -> None:
        self._free.setdefault(int(place.rpartition("x")[2]), []).append(place)

    def flush(self) -> None:
        while self._writing:
            self._oldest()

    def memory(self) -> dict[str, int]:
        return {"host": self._writing_bytes, "nvme": self._file_bytes}

    def close(self) -> None:
        self._store.close(remove=True)
        self._writing.clear()

    def _new_name(self, form: Form) -> str:
        self._count += 1
        self._file_bytes += form.nbytes
        return f"activation {self._count} of {'x'.join(map(str, form.shape))} {form.dtype} bytes x{form.nbytes}"

    def _oldest(self) -> None:
        name, request, buffer = self._writing.popleft()
        self._writing_bytes -= buffer.numel()
        with naming(name, "write"), self._waiting("activations out", name, request):
            request.wait()

    def _follow(self, hop: str, name: str, form: Form, request: Request) -> None:
        if self._trace is not None:
            self._trace.follow(hop, name, form.nbytes, request.wait)

    def _waiting(self, hop: str, name: str, request: Request) -> AbstractContextManager[None]:
        if self._trace is None or request.done():
            return nullcontext()
        return self._trace.span(hop, name, waiting=True)
