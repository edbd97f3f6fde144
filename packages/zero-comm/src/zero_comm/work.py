"""A collective in flight that owns its buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Protocol

import torch

from .device_times import DeviceMarks
from .errors import CommError, PeerError
from .flight_recorder import Ticket
from .ledger import Ledger
from .tag import Tag
from .watched import Watched


class Waitable(Protocol):
    """The handle that torch.distributed returns for an asynchronous operation."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Block until the operation is complete; raise RuntimeError if it failed, or after ``timeout``."""


class Work:
    """A started collective; `wait` finishes it.

    Holds ``buffers``, which the transport may still touch. ``pending``: the operations to wait for, each with the peer
    rank that errors name (None: unknown). ``finish``: the computation after the transport (for the reduction: the local
    sum); runs once, in the thread that waits. ``advance``: starts the last hop, where the work consists of several
    collectives (hops), one after the other. ``explain``: replaces an error by one with its cause. ``ticket``: marks the
    entry in the flight recorder as waited for. ``ledger``: gets the seconds that the transport took and the seconds
    waited. ``watched``: shows to the watch what this rank waits for.

    If ``buffers`` are on an accelerator, the wait only orders streams. Then the ledger's times and the end of the entry
    in the flight recorder come from events of the device, and the times only with `Ledger.times_devices`. ``tag``:
    names the collective in errors, in the ledger and for the watch.
    """

    def __init__(
        self,
        tag: Tag,
        pending: Sequence[tuple[Waitable, int | None]] = (),
        *,
        buffers: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        explain: Callable[[CommError], CommError] | None = None,
        ticket: Ticket | None = None,
        advance: Callable[[], None] | None = None,
        ledger: Ledger | None = None,
        watched: Watched | None = None,
    ) -> None:
        self.tag = tag
        self._pending = list(pending)
        self._buffers = tuple(buffers)
        self._finish = finish
        self._explain = explain
        self._ticket = ticket
        self._advance = advance
        self._ledger = ledger
        self._watched = watched
        self._failure: BaseException | None = None
        self._began = time.perf_counter()
        device = next((b.device for b in buffers if b.device.type != "cpu"), None) if pending else None
        timed = ledger is not None and ledger.times_devices
        self._marks = None if device is None else DeviceMarks(device, timed=timed)

    @property
    def has_hops(self) -> bool:
        """Return whether `advance` may have something to do: the collective has several hops, and neither `advance` nor
        `wait` was called. Its last hop may have started nevertheless, by `advance` of a later collective."""
        return self._advance is not None

    def advance(self) -> None:
        """Start the last hop of a collective of several hops; do nothing for a single hop, or when it has started.

        Blocks until the earlier hops are complete, for which every rank must have started this collective. Other ranks
        may wait for the last hop: call this before waiting for anything that another rank starts only after this
        collective. Raises as `wait` does.
        """
        advance, self._advance = self._advance, None
        if advance is not None:
            self._compute(advance)

    def wait(self, patience: timedelta | None = None) -> None:
        """Block until the result is in place (on an accelerator: until the current stream is ordered behind it), and
        count the seconds in the ledger. Does nothing when it has returned before.

        Raises `PeerError` when the transport reports that a rank is gone, or after ``patience`` (None: the group's own
        timeout), and whatever ``finish`` or ``advance`` raises, KeyboardInterrupt too. Another `wait` then raises the
        same exception at once. After `PeerError` the group is unusable: gloo would block for ever when asked twice for
        one message. ``patience`` does not reach the waits that are inside ``finish`` and ``advance`` (several hops, a
        codec).
        """
        if self._failure is not None:
            raise self._failure
        if self._pending:
            before = time.perf_counter()
            if self._watched is not None:
                self._watched.waiting = (self.tag, time.monotonic(), False)
            if self._marks is not None:
                self._marks.begin_wait()
            with self._ticket or nullcontext():
                self._wait_for_transport(() if patience is None else (patience,))
                if self._ticket is not None and self._marks is not None:
                    self._ticket.ends_with(self._marks.complete)
            if self._watched is not None:
                self._watched.waiting = None
            if self._ledger is not None and self._marks is not None:
                self._ledger.count_on_device(self.tag, self._marks)
            elif self._ledger is not None:
                now = time.perf_counter()
                self._ledger.count_seconds(self.tag, now - self._began, now - before)
        self._pending.clear()
        self._advance = None
        finish, self._finish = self._finish, None
        if finish is not None:
            self._compute(finish)
        self._buffers = ()

    def _compute(self, computation: Callable[[], None]) -> None:
        """Run ``computation``, which is ``finish`` or ``advance``. What it raises is raised here, and by later
        waits."""
        try:
            computation()
        except BaseException as failure:
            self._failure = failure
            raise

    def _wait_for_transport(self, limit: tuple[timedelta, ...]) -> None:
        """Wait for all pending operations. ``limit``: the arguments of their ``wait``: empty, or the longest time.
        Raises `PeerError`, which later waits raise again, when one fails or takes longer."""
        for waitable, peer in self._pending:
            try:
                waitable.wait(*limit)
            except RuntimeError as error:
                if self._watched is not None:
                    self._watched.waiting = None
                who = "a rank" if peer is None else f"rank {peer}"
                failure: CommError = PeerError(f"{self.tag}: {who} did not answer: {error}")
                self._failure = failure if self._explain is None else self._explain(failure)
                raise self._failure from error
