"""The streams in which an accelerator runs a reduction in several hops: collectives one after the other, each over some
of the ranks.

[Note: streams of the hops] An accelerator gets all hops at once. They run in two streams of their own: the hop inside
the node or the replica in one, everything behind it in the other, so that neither compute nor the first hop of the next
reduction queues behind the network between nodes. `Work.wait` has the current stream wait for the last of it. A
stream's temporary memory is used in that stream alone; what the streams share is the current stream's, and is held
until it has waited.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch

from .ledger import Ledger

Started = TypeVar("Started")


class HopStreams:
    """The two streams of one reduction's hops, see [Note: streams of the hops]; made at their first use.

    ``ledger``: gets no times of the hops, only those of the reduction as a whole.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._streams: tuple[torch.Stream, torch.Stream] | None = None

    def run(self, device: torch.device, begin: Callable[[], Started], rest: Callable[[Started], None]) -> StreamEnd:
        """Queue the work of ``begin()`` in the first stream, behind what the current stream of ``device`` has queued,
        and that of ``rest``, called with what ``begin`` returned, in the second stream behind the first. Return the end
        of the second stream. The host waits for neither."""
        if self._streams is None:
            self._streams = torch.Stream(device), torch.Stream(device)
        inside, across = self._streams
        with self._ledger.hops_of_one():
            inside.wait_stream(torch.accelerator.current_stream(device))
            with inside:
                started = begin()
            across.wait_stream(inside)
            with across:
                rest(started)
        return StreamEnd(across)


class StreamEnd:
    """The end of the work that is queued in ``stream`` now, to be waited for like an operation of torch.distributed."""

    def __init__(self, stream: torch.Stream) -> None:
        self._device = stream.device
        self._event = stream.record_event()

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """Have the current stream wait until ``stream`` has done the work that was queued when this object was made.
        The host does not wait, whatever ``timeout`` is."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
