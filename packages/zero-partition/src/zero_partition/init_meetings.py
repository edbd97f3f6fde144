"""Meetings of the ranks inside `Init`, at which one rank can request a collective that only it has come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zero_comm import Control, DesyncError, Message

from .sharded_parameter import ShardedParameter, records_by_number

USE, EVICT, SHARD, GATHER, END = "use", "evict", "shard", "gather", "end"
_ON_REQUEST = (USE, EVICT)


class InitMeetings:
    """Exchanges messages among the ranks of one `Init`, and serves requests of single ranks.

    [Note: what one rank does alone] Code may initialise a parameter on rank 0 alone after it was sharded, and gathering
    it needs all ranks. So a rank that needs the values sends a request at its next meeting. All ranks serve the request
    of the lowest rank that has one, and then the ranks that came for something else meet again. So the same parameters
    are full on all ranks, whichever rank asked.

    A meeting is for one call on some records, the `ShardedParameter` of each parameter. The calls are `USE` (gather
    values for code that touches them) and `EVICT` (reshard the oldest), which are requests, `SHARD`, `GATHER` (for the
    user) and `END`. ``take_part``: carries out a request (call, records) on this rank; it runs on every rank.
    ``control``: carries the messages; its ranks are those that shard.
    """

    def __init__(self, control: Control, take_part: Callable[[str, list[ShardedParameter]], None]) -> None:
        self._control = control
        self._take_part = take_part

    def meet(self, call: str, records: Sequence[ShardedParameter], payload: Any = None) -> list[Any] | None:
        """Meet the other ranks for ``call`` on ``records``. Collective.

        Return all ranks' ``payload``, in rank order, if every rank has come for the same call on the same parameters.
        Return None after a request was served, this rank's or another's: the caller looks again what is left to do.
        Raises `DesyncError` on every rank if they have come for different things and none is a request.
        """
        name = f"{call} {_describe(records)}"
        messages = self._control.exchange(Message("Init", name, 0, [call, [r.number for r in records], payload]))
        if any(message.kind != "Init" for message in messages):
            self._control.check_same(messages)
        calls = [message.payload[:2] for message in messages]
        if all(one == calls[0] for one in calls):
            return [message.payload[2] for message in messages]
        asked = next((rank for rank, one in enumerate(calls) if one[0] in _ON_REQUEST), None)
        if asked is None:
            raise _desync_error(messages)
        self._take_part(calls[asked][0], self._find(calls[asked][1], messages))
        return None

    def exchange(self, call: str, payload: Any) -> list[Any]:
        """Return all ranks' ``payload``, in rank order, at the point that ``call`` names, which all ranks are known to
        have reached. Collective. Raises `DesyncError` if they have not."""
        return self._control.agree(Message("Init", call, 0, payload))

    def _find(self, numbers: Sequence[int], messages: Sequence[Message]) -> list[ShardedParameter]:
        """Return this rank's records with these ``numbers``. Raises `DesyncError`, listing ``messages`` (by rank), on
        every rank if one lacks any of them. Collective."""
        found = records_by_number(numbers)
        if not all(self.exchange("take part", len(found) == len(numbers))):
            raise _desync_error(messages)
        return found


def _describe(records: Sequence[ShardedParameter]) -> str:
    """Return words about ``records`` for messages: "weight of Linear and 3 more", "of Init" if there are none."""
    return f"{records[0].name} and {len(records) - 1} more" if records else "of Init"


def _desync_error(messages: Sequence[Message]) -> DesyncError:
    """Return the error that lists, from ``messages`` in rank order, what each rank came to do."""
    listing = "\n".join(f"  rank {rank}: {message}" for rank, message in enumerate(messages))
    return DesyncError(
        f"the ranks build different models inside Init:\n{listing}\n"
        "Every rank must make the same modules and copies in the same order; values may differ, and rank 0's count."
    )
