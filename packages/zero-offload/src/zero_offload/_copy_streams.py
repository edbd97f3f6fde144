"""Copies between an accelerator and the host that run beside compute. On the CPU they are synchronous."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ._memory import nbytes_of
from .trace import Trace

__all__ = ["CopyStream", "DeviceCopies", "compute_device"]


def compute_device(device: torch.device | str | None) -> torch.device:
    """Return ``device`` if it is not None, else the current accelerator, else the CPU."""
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


class CopyStream:
    """One stream for copies to and from ``device``; on the CPU copies are synchronous. ``trace``, if not None, records
    the copies under the name ``hop``.
    """

    def __init__(self, device: torch.device, trace: Trace | None = None, hop: str = "") -> None:
        self.device = device
        self._trace = trace
        self._hop = hop
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Start ``target.copy_(source)`` after the work queued on the current stream; return an event that is reached
        when the copy has ended, or None if it has ended already.

        Neither tensor may be written until then, and ``target`` is not valid before; `join` makes queued work wait for
        the event. A device's tensor may be dropped earlier, as its memory is not reused until the copy has ended; host
        memory has to be kept, and to be pinned for the copy to run beside computation.
        """
        if self._stream is None:
            with nullcontext() if self._trace is None else self._trace.span(self._hop, "copy", nbytes_of(target)):
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
            event: torch.Event = self._stream.record_event()
        for tensor in (target, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(self._stream)
        if self._trace is not None:
            self._trace.follow(self._hop, "copy", nbytes_of(target), event.synchronize)
        return event

    def join(self, event: torch.Event | None) -> None:
        """Make the current stream wait for ``event``, which `copy` returned; do nothing for None. The host does not
        block.
        """
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        """Block until every copy has ended; return at once for the CPU."""
        if self._stream is not None:
            self._stream.synchronize()


class DeviceCopies:
    """The copies of shards on ``device``, by the shards' names, with the events that mark the end of each copy in
    either direction. ``trace``, if not None, records the copies.
    """

    def __init__(self, device: torch.device, trace: Trace | None = None) -> None:
        self.stream = CopyStream(device, trace, "shards, device")
        self._on_device: dict[str, tuple[torch.Tensor, torch.Event | None]] = {}
        self._leaving: dict[str, torch.Event | None] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether the device has a copy of a shard, or one is on its way there."""
        return name in self._on_device

    def fetch(self, name: str, host: torch.Tensor) -> torch.Event | None:
        """Start copying a shard from ``host`` to the device. If a copy of it back to the host is under way, block until
        that has ended. Return the event after which ``host`` may be written again, None if it may be at once.
        """
        self.settle(name)
        copy = torch.empty_like(host, device=self.stream.device)
        event = self.stream.copy(copy, host)
        self._on_device[name] = (copy, event)
        return event

    def get(self, name: str) -> torch.Tensor:
        """Return the device copy of a shard, for work that is queued on the current stream from now on; valid until
        `drop` or `forget`. The host does not wait. KeyError if the shard was not fetched.
        """
        copy, event = self._on_device[name]
        self.stream.join(event)
        return copy

    def send_back(self, name: str, host: torch.Tensor) -> None:
        """Start copying the device copy of a fetched shard to ``host``, which must not be read before `settle`."""
        self._leaving[name] = self.stream.copy(host, self._on_device[name][0])

    def drop(self, name: str) -> None:
        """Free the device copy of a shard, if there is one, without waiting. Work that uses the copy may still run, and
        the copy to the device may still read the host's memory until the event of `fetch`.
        """
        self._on_device.pop(name, None)

    def forget(self, name: str) -> None:
        """Free the device copy of a shard, if there is one; block until no copy in either direction uses the host's
        memory.
        """
        self.settle(name)
        _, event = self._on_device.pop(name, (None, None))
        if event is not None:
            event.synchronize()

    def settle(self, name: str) -> None:
        """Block until a shard that was sent back has arrived on the host; return at once if none was."""
        event = self._leaving.pop(name, None)
        if event is not None:
            event.synchronize()

    def flush(self) -> None:
        """Block until every shard that was sent back has arrived."""
        for name in list(self._leaving):
            self.settle(name)
