"""torch's own rendezvous for a job whose hosts come and go, with its state on the launcher's channels."""

from __future__ import annotations

import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from zero_launch.channel import Channel
from zero_launch.meeting_state import to_pickle, to_plain
from zero_launch.messages import Message, no_report
from zero_launch.sockets import STORE_SECONDS, open_store

_JOIN_DAYS = 30  # a host waits for the next checkpoint; the launcher knows when a job waits in vain
_ANSWER_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 0.1
_BEAT_SECONDS = 5
_BEATS = 120  # the launcher knows of lost hosts, and moves times from one clock to another


class _MeetAgain(Exception):
    """The store of the agreed round cannot be used, as its host is gone or the round restarts; meet again."""


class ChannelBackend(RendezvousBackend):
    """A `RendezvousBackend` of torch's whose state the launcher holds (see `meeting_state.VersionedState`).

    ``channel`` leads to the launcher. The methods block until the launcher answers, and raise RendezvousConnectionError
    when the channel is broken or silent for 30 s. States are pickles that this process makes and reads; a token is the
    version of a state.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._number = 0
        self.answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """The launcher's answers; the reader of the channel puts them here."""

    @property
    def name(self) -> str:
        """This backend's name, for torch's logs."""
        return "zero-launch"

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return (the newest state, its version); None before there is a state."""
        answer = self._exchange_state(None, None)
        return None if answer["state"] is None else (to_pickle(answer["state"]), answer["version"])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Offer ``state`` as the successor of the state of version ``token`` (None: there is none yet); return (the
        newest state, its version, whether ``state`` was accepted), never None."""
        answer = self._exchange_state(to_plain(state), token)
        return to_pickle(answer["state"]), answer["version"], answer["replaced"]

    def _exchange_state(self, state: dict[str, Any] | None, version: int | None) -> Message:
        """Send the launcher a message `state` that offers ``state`` as the successor of ``version``, or with None only
        asks for the newest; return the launcher's answer, also a message `state`. Blocks and raises as the class says.
        """
        with self._lock:
            self._number += 1
            self._channel.send("state", number=self._number, state=state, version=version)
            while True:
                try:
                    answer = self.answers.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    # A launcher that lives may be held up for long, by a terminal that shows nothing more.
                    if self._channel.broken or self._channel.silence > _ANSWER_SECONDS:
                        raise RendezvousConnectionError("the launcher does not answer") from None
                    continue
                if answer["number"] == self._number:
                    return answer


class Meeting(DynamicRendezvousHandler):
    """The rendezvous of one host's agent; torch's algorithm says who takes part in a round (one start of all ranks), in
    the host list's order.

    The first host of a round opens the ranks' store (torch's TCPStore) on its own address and tells the launcher, which
    tells the others. A round ends when the launcher says `again` (a rank or a host was lost) or when this host's ranks
    have left to regroup; a new host waits until then. Make it by `of`.
    """

    backend: ChannelBackend
    attempt: int
    """The number of the round that runs, as the launcher counts: 0, then one more each time."""
    place: tuple[int, int]
    """The first rank of this host, and the number of ranks of the round."""
    report: Message
    """What became of the ranks of the attempt that just ended; sent with `ready`."""

    @classmethod
    def of(cls, channel: Channel, job_id: str, terms: Message) -> Meeting:
        """Return the rendezvous for this host. ``channel`` leads to the launcher; ``terms``: the field `elastic` of its
        message `job`, made by `ElasticCluster._terms`."""
        backend = ChannelBackend(channel)
        join = timedelta(days=_JOIN_DAYS)
        made: Meeting = cls.from_backend(
            job_id,
            HashStore(),
            backend,
            terms["least"],
            terms["most"],
            local_addr=terms["place"],
            timeout=RendezvousTimeout(join=join, last_call=join),
            keep_alive_interval=_BEAT_SECONDS,
            keep_alive_max_attempt=_BEATS,
        )
        made.backend, made.attempt, made.place, made.report = backend, 0, (0, 0), no_report()
        made._channel, made._address = channel, terms["address"]
        made._meets, made._server = queue.SimpleQueue(), None
        made._restart_of, made._regroups = None, False
        return made

    _channel: Channel
    _address: str
    _meets: queue.SimpleQueue[Message]
    _server: TCPStore | None
    _restart_of: int | None
    _regroups: bool

    def take(self, message: Message) -> bool:
        """Handle a message of the launcher about rounds, and return True: queue `state` and `meet` for the methods that
        wait for them, and note `again`. Return False, and do nothing, for any other message."""
        kind = message["kind"]
        if kind == "state":
            self.backend.answers.put(message)
        elif kind == "meet":
            self._meets.put(message)
        elif kind == "again":
            self._restart_of = message["attempt"]
        else:
            return False
        return True

    def regroup(self) -> None:
        """Have torch's agent begin a new round, because this host's ranks have left for one."""
        self._regroups = True

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks use the agent's store."""
        return True

    def num_nodes_waiting(self) -> int:
        """Return 1, for which torch's agent restarts its ranks, if the ranks have left to regroup or the launcher has
        asked for a restart; else 0, even if hosts wait."""
        return int(self._regroups or self._restart_of == self.attempt)

    def next_rendezvous(self) -> RendezvousInfo:
        """Send `ready` with the report of the attempt before, wait for the next round with this host, and return it.

        Blocks until there is a round, as torch's `DynamicRendezvousHandler` does, and meets again if the round's store
        is lost.
        """
        self._server, self._regroups = None, False
        self._channel.send("ready", **self.report)
        self.report = no_report()
        while True:
            try:
                return super().next_rendezvous()
            except _MeetAgain:
                continue

    def _get_store(self) -> PrefixStore:
        """Return the ranks' store for the round just agreed, a new one each time; the round's first host opens it.

        Raises `_MeetAgain` when that host is lost meanwhile.
        """
        number, (rank, _) = self._state_holder.state.round, self._get_world()
        if rank == 0:
            self._server = open_store(self._address, 0)
            self._channel.send("served", round=number, port=self._server.port)
        order = self._wait_for_store(number)
        self.attempt, self.place = order["attempt"], (order["first"], order["ranks"])
        address, port = order["address"], order["port"]
        self._wait_for_server(address, port)
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
        self._bootstrap_store_info = RendezvousStoreInfo(address, port)
        self._shared_tcp_store_server = store  # torch would open one on every interface otherwise
        return PrefixStore("zero-launch", store)

    def _wait_for_server(self, address: str, port: int) -> None:
        """Wait until the store at ``address`` and ``port`` accepts connections; raise `_MeetAgain` if the launcher asks
        for a restart before that. (torch's own client would try for a minute after the store's host was lost.)"""
        while True:
            if self._restart_of == self.attempt:
                raise _MeetAgain
            try:
                socket.create_connection((address, port), timeout=_LOOK_SECONDS).close()
                return
            except OSError:
                time.sleep(_PAUSE_SECONDS)

    def _wait_for_store(self, number: int) -> Message:
        """Return the launcher's message `meet` for round ``number``; raise `_MeetAgain` when torch's state no longer
        has that round, or has lost the host that opens its store."""
        while True:
            try:
                order = self._meets.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self._state_holder.sync()
                state = self._state_holder.state
                if state.round != number or not state.complete or 0 not in state.participants.values():
                    raise _MeetAgain from None
                continue
            if order["round"] == number:
                return order
