"""The hosts' requests for the state of torch's rendezvous that the launcher holds back while there is no news."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from zero_launch.meeting_state import VersionedState, on_another_clock
from zero_launch.peers import Peer

_HOLD_SECONDS = 5.0
"""How long an answer without news is held back; torch's algorithm asks again a second after it."""


@dataclass(frozen=True)
class _Question:
    """A host's request that is not answered yet. ``number``: of the request. ``replaced``: the host's own new state was
    accepted. ``until``: answer it by then (`time.monotonic`)."""

    peer: Peer
    number: int
    replaced: bool
    until: float


class HeldQuestions:
    """The requests that wait for an answer, which is the newest state of ``meeting``. ``places``: the place (number in
    the host list, as text) of each host, by `Peer.name`."""

    def __init__(self, meeting: VersionedState, places: Mapping[str, str]) -> None:
        self._meeting, self._places = meeting, places
        self._questions: list[_Question] = []

    def add(self, peer: Peer, number: int, *, replaced: bool) -> None:
        """Keep request ``number`` of a host until `answer` sends its answer. ``replaced``: the state that came with the
        request has become the newest."""
        self._questions.append(_Question(peer, number, replaced, time.monotonic() + _HOLD_SECONDS))

    def answer(self) -> None:
        """Send the newest state to each host that has something to do in it, and to each whose request has been held
        for `_HOLD_SECONDS`; keep the other requests. A host waits a second after an answer before it asks again; one
        whose request is held learns of a new round at once."""
        now = time.monotonic()
        asked, self._questions = self._questions, []
        for question in asked:
            if question.until > now and self._meeting.waits(self._places[question.peer.name]):
                self._questions.append(question)
            else:
                newest = self._meeting.newest()
                newest["state"] = on_another_clock(newest["state"], -question.peer.clock_offset)
                question.peer.send("state", number=question.number, replaced=question.replaced, **newest)
