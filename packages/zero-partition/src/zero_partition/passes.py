"""Agreement between ranks on what happens next, so that none waits for a collective that another will not issue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_comm import Control, Message

_REQUEST = "request"


class EndOfBackward:
    """What autograd calls when its run is over, for a backward pass that the user started.

    A run that raises drops it uncalled, before the exception reaches the user; then ``failed`` is called instead.
    """

    def __init__(self, end: Callable[[], None], failed: Callable[[], None]) -> None:
        self._end = end
        self._failed: Callable[[], None] | None = failed

    def __call__(self) -> None:
        self._failed = None
        self._end()

    def __del__(self) -> None:
        if self._failed is not None:
            self._failed()


class Agreement:
    """Keeps the ranks together; ``serve(unit, mine)`` takes part in a requested gather, ``mine`` if this rank wants it.

    Every rank passes the same points in the same order: the start of a forward or backward pass, the step, a
    gather by the user.

    [Note: requests] Within a pass, gathers follow the agreed order and each unit comes once. A rank that needs a unit
    the order cannot give (released already, or never learned) joins what is left of the order and then sends a
    *request* at its next agreement point. The other ranks meet the request at their next point, whatever that is,
    serve it, and repeat their own message. So nobody hangs and nobody has to guess what another rank will compute.
    """

    def __init__(self, control: Control, serve: Callable[[int, bool], None]) -> None:
        self._control = control
        self._serve = serve

    def start(self, kind: str, name: str, step: int, payload: Any = None, beside: str | None = None) -> list[Any]:
        """Meet the other ranks at ``kind``/``name``; return their payloads in rank order.

        Ranks may be at ``beside`` instead. Raises `DesyncError` listing every rank's call when they differ otherwise.
        """
        messages = self._exchange(Message(kind, name, step, payload))
        self._control.check_same([m for m in messages if m.kind != beside])
        return [m.payload for m in messages]

    def meet(self, kind: str, step: int, payload: Any) -> list[Message]:
        """Meet the other ranks, whatever they are at, as long as those that are not at ``kind`` are at the same;
        return their messages in rank order."""
        messages = self._exchange(Message(kind, "", step, payload))
        self._control.check_same([m for m in messages if m.kind != kind])
        return messages

    def request(self, unit: int, step: int) -> None:
        """Have every rank take part in gathering ``unit`` outside the order; return when it was issued."""
        self._serve_requests(self._control.exchange(Message(_REQUEST, "", step, unit)))

    def _exchange(self, message: Message) -> list[Message]:
        """Exchange ``message``, again after every round in which somebody requested a unit."""
        while True:
            messages = self._control.exchange(message)
            if not self._serve_requests(messages):
                return messages

    def _serve_requests(self, messages: list[Message]) -> bool:
        wanted = dict.fromkeys(m.payload for m in messages if m.kind == _REQUEST)
        mine = messages[self._control.rank]
        for unit in wanted:
            self._serve(unit, mine.kind == _REQUEST and mine.payload == unit)
        return bool(wanted)
