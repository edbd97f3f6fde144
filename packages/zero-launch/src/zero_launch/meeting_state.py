"""The state of torch's rendezvous as plain data, and its one copy, which the launcher holds.

torch's `DynamicRendezvousHandler` decides who takes part in a round. It hands its state to a back end as a pickle. Here
that pickle never leaves the process that made it: what travels is checked plain data (see messages.py), over the
launcher's own channels.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from typing import Any

State = dict[str, Any]
"""`round`, `complete`, `closed`, `deadline` (seconds since the epoch, or None), `participants` and `heartbeats` (lists
of [node, number]), `waiting` and `redundant` (lists of nodes). A node is [place, pid, number]."""


def to_plain(pickled: bytes) -> State:
    """Return torch's rendezvous state as plain data.

    ``pickled``: the state as torch's handler has just pickled it in this process; nothing else may be passed.
    """
    state = pickle.loads(pickled)
    return {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": None if state.deadline is None else state.deadline.timestamp(),
        "participants": [[_node_fields(node), rank] for node, rank in state.participants.items()],
        "waiting": sorted(map(_node_fields, state.wait_list)),
        "redundant": sorted(map(_node_fields, state.redundancy_list)),
        "heartbeats": [[_node_fields(node), at.timestamp()] for node, at in state.last_heartbeats.items()],
    }


def places_in(plain: Mapping[str, Any] | None) -> set[str]:
    """Return every host's place (its number in the host list, as text) that a state names; empty for None."""
    if plain is None:
        return set()
    numbered = [node for node, _ in [*plain["participants"], *plain["heartbeats"]]]
    return {node[0] for node in [*numbered, *plain["waiting"], *plain["redundant"]]}


def on_another_clock(plain: State | None, ahead: float) -> State | None:
    """Return the state with its times moved to a clock that is ``ahead`` seconds ahead; None for None.

    A time of 0, which marks lost nodes and a wait that is over, stays 0.
    """
    if plain is None:
        return None
    moved = dict(plain)
    if moved["deadline"]:
        moved["deadline"] += ahead
    moved["heartbeats"] = [[node, at + ahead if at else at] for node, at in plain["heartbeats"]]
    return moved


def to_pickle(plain: Mapping[str, Any]) -> bytes:
    """Return the pickled state that torch's handler in this process reads. ``plain``: a checked `State`."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    def node(entry: list[Any]) -> _NodeDesc:
        """Return torch's description of a node from the plain list of its fields."""
        return _NodeDesc(*entry)

    state = _RendezvousState()
    state.round, state.complete, state.closed = plain["round"], plain["complete"], plain["closed"]
    state.deadline = None if plain["deadline"] is None else _datetime_of(plain["deadline"])
    state.participants = {node(entry): rank for entry, rank in plain["participants"]}
    state.wait_list = set(map(node, plain["waiting"]))
    state.redundancy_list = set(map(node, plain["redundant"]))
    state.last_heartbeats = {node(entry): _datetime_of(at) for entry, at in plain["heartbeats"]}
    return pickle.dumps(state)


def _node_fields(node: Any) -> list[Any]:
    """Return torch's description of a node as [place, pid, number]."""
    return [node.addr, node.pid, node.local_id]


def _datetime_of(seconds: float) -> datetime:
    """Return the time, in UTC, of ``seconds`` since the epoch."""
    return datetime.fromtimestamp(seconds, timezone.utc)


class VersionedState:
    """The launcher's copy of the state, which a host may replace only if it has seen the newest version.

    All times in it are by the launcher's clock. A place is a host's number in the host list, as text.

    torch's handlers know of a lost node by its missing heartbeats, and wait some time for late ones. The launcher knows
    sooner: `lost` lets the heartbeats of a place expire, and `review` ends the wait when no other host can come.
    """

    def __init__(self) -> None:
        self._state: State | None = None
        self._version = 0

    def replace(self, state: State, version: int | None) -> bool:
        """Replace version ``version`` (None: none yet) by a copy of ``state`` and return True; return False, without a
        change, if another version is the newest."""
        if version != (None if self._state is None else self._version):
            return False
        self._state = copy.deepcopy(state)
        self._version += 1
        return True

    def newest(self) -> dict[str, Any]:
        """Return {"state": a copy of the state, None before there is one; "version": its number}."""
        return {"state": copy.deepcopy(self._state), "version": self._version}

    def waits(self, place: str) -> bool:
        """Return whether the handler at ``place`` can do nothing but ask again: it takes part in a round that is not
        agreed yet, or waits for the next one. False before there is a state."""
        state = self._state
        if state is None:
            return False
        if place in self.participants:
            return not state["complete"] and state["deadline"] != 0.0
        return bool(state["complete"]) and place in {node[0] for node in state["waiting"]}

    @property
    def participants(self) -> set[str]:
        """The places of the hosts that take part in the present round and are not lost; empty before there is a state.
        A host that is back at the place of a lost one takes part in the next."""
        if self._state is None:
            return set()
        lost = [node for node, at in self._state["heartbeats"] if not at]
        return {node[0] for node, _ in self._state["participants"] if node not in lost}

    def lost(self, place: str) -> None:
        """Let the heartbeats of the host at ``place`` expire, because it is lost: torch's handlers then drop it. Does
        nothing before there is a state."""
        if self._state is not None:
            beats = self._state["heartbeats"]
            self._state["heartbeats"] = [[node, 0.0 if node[0] == place else at] for node, at in beats]
            self._version += 1

    def review(self, expected: Collection[str], slots: Mapping[str, int], least: int) -> None:
        """End the wait for further hosts if every ``expected`` place takes part and the participants have ``least``
        ranks, so that the round begins.

        Does nothing while no hosts meet, and once the round has begun. ``slots``: number of ranks at each place.
        """
        state = self._state
        if state is None or state["complete"] or not state["deadline"]:
            return
        here = self.participants
        if here >= set(expected) and sum(slots[place] for place in here) >= least:
            state["deadline"] = 0.0
            self._version += 1

    def dissolve(self) -> None:
        """End the agreed round before it begins: its participants meet again for the next one."""
        if self._state is not None:
            self._state |= {"round": self._state["round"] + 1, "complete": False, "deadline": None, "participants": []}
            self._version += 1
