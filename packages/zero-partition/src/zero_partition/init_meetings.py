"""Meetings of the ranks inside `Init`, at which one of them can have the others take part in what it does alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zero_comm import Control, DesyncError, Message

from .sharded_parameter import ShardedParameter, records_by_number

USE, EVICT, SHARD, GATHER, END = "use", "evict", "shard", "gather", "end"
_ON_REQUEST = (USE, EVICT)


class InitMeetings:
    """The agreements of one `Init`.

    [Note: what one rank does alone] Code may initialise a parameter on rank 0 alone after it was sharded, and its
    values come from all ranks. So a rank that needs them asks at its next meeting, whatever the others are there for:
    all take part in the request of the lowest rank that has one, then those that came for something else meet again.
    Which parameters are full is thus the same on all ranks, whoever asked.

    ``take_part``: does on this rank what a request asks for, here and on every other rank.
    """

    def __init__(self, control: Control, take_part: Callable[[str, list[ShardedParameter]], None]) -> None:
        self._control = control
        self._take_part = take_part

    def meet(self, call: str, records: Sequence[ShardedParameter], payload: Any = None) -> list[Any] | None:
        """Return the ranks' payloads where all do the same to the same parameters; None after a request was met, this
        rank's or another's: look again at what is left to do.

        Raises `DesyncError` on every rank where they do different things and none is a request.
        """
        name = f"{call} {_first_of(records)}"
        messages = self._control.exchange(Message("Init", name, 0, [call, [r.number for r in records], payload]))
        if any(message.kind != "Init" for message in messages):
            self._control.check_same(messages)
        calls = [message.payload[:2] for message in messages]
        if all(one == calls[0] for one in calls):
            return [message.payload[2] for message in messages]
        asked = next((rank for rank, one in enumerate(calls) if one[0] in _ON_REQUEST), None)
        if asked is None:
            raise _apart(messages)
        self._take_part(calls[asked][0], self._find(calls[asked][1], messages))
        return None

    def exchange(self, call: str, payload: Any) -> list[Any]:
        """Return the ranks' payloads, at a point at which all ranks are known to be."""
        return self._control.agree(Message("Init", call, 0, payload))

    def _find(self, numbers: Sequence[int], messages: Sequence[Message]) -> list[ShardedParameter]:
        found = records_by_number(numbers)
        if not all(self.exchange("take part", len(found) == len(numbers))):
            raise _apart(messages)
        return found


def _first_of(records: Sequence[ShardedParameter]) -> str:
    return f"{records[0].name} and {len(records) - 1} more" if records else "of Init"


def _apart(messages: Sequence[Message]) -> DesyncError:
    listing = "\n".join(f"  rank {rank}: {message}" for rank, message in enumerate(messages))
    return DesyncError(
        f"the ranks build different models inside Init:\n{listing}\n"
        "Every rank must make the same modules and copies in the same order; values may differ, and rank 0's count."
    )
