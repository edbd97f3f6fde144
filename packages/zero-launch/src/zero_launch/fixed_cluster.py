"""A job with a fixed set of hosts: every attempt runs on those that were not lost."""

from __future__ import annotations

import time
from typing import Any

from zero_launch.cluster import Cluster
from zero_launch.messages import Message
from zero_launch.peers import Peer
from zero_launch.presence import Presence
from zero_launch.report import LaunchError, RankFailure
from zero_launch.spec import ClusterSpec


class FixedCluster(Cluster):
    """A `Cluster` with a fixed set of hosts: every attempt runs on all of them that were not lost, and needs at least
    the `min_hosts` of ``spec`` (None: all)."""

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
        self._store_host: Peer | None = None
        self._ranks = self._roster.slots
        self._handlers["store"] = self._on_store

    @property
    def _minimum(self) -> int:
        """The fewest hosts that may begin: all, unless the job says otherwise."""
        return len(self._roster.peers) if self._spec.min_hosts is None else self._spec.min_hosts

    @property
    def _world_size(self) -> int:
        """The number of ranks of the present attempt; before the first, of all hosts."""
        return self._ranks

    def _terms(self, peer: Peer) -> dict[str, Any] | None:
        """Return None: hosts need no terms where their number is fixed."""
        return None

    def _lead(self) -> None:
        """Handle messages and lost hosts until the job is to stop or no host takes part any more."""
        while self._stopping is None and self._roster.present:
            self._next_message()
            self._lose_silent_hosts()
            for text in self._presence.remarks():
                self._remark(text)

    def _on_ready(self, peer: Peer, message: Message) -> None:
        """Note that the host is ready and keep its report of the attempt before; begin the next round once all present
        hosts are ready."""
        peer.state = "ready"
        peer.take_report(message)
        if all(other.state == "ready" for other in self._roster.present):
            self._begin_round()

    def _begin_round(self) -> None:
        """Ask the first present host to open the ranks' store, unless it has been asked and has not answered yet;
        `_on_store` then starts the ranks. On a restart, print the failure before that, or stop the job if a restart
        cannot help (`_is_hopeless`). Call it when all present hosts are ready."""
        if self._restarting and self._is_hopeless(self._attempt):
            return
        if self._restarting:
            self._restarting = False
            error = LaunchError(self._failures(), self._world_size, divergence=self._divergence)
            self._say(f"{error}\nzero-launch: restart {self._attempt} of {self._spec.job.max_restarts}")
            self._divergence = None
            self._lost.clear()
        for peer in self._roster.present:
            peer.forget_attempt()
        self._began_at = time.time()
        first = self._roster.present[0]
        if self._store_host is not first:  # else it was asked, and its answer is on its way
            self._store_host = first
            address = self._spec.bind_address or self._roster.addresses.of_store(first)
            first.send("serve", address=address, port=self._roster.store_port)

    def _on_store(self, peer: Peer, message: Message) -> None:
        """Begin the round: send every host its ranks and the address of the store, which ``peer`` has opened. Does
        nothing if ``peer`` was not asked to open it."""
        if peer is not self._store_host:
            return
        self._store_host = None
        address = self._roster.addresses.of_store(peer)
        peers = self._roster.present
        ranks = self._ranks = sum(len(other.slots) for other in peers)
        self._presence = Presence(ranks, f"{address}:{message['port']}")
        first = 0
        for number, other in enumerate(peers):
            other.state = "running"
            other.send(
                "round",
                attempt=self._attempt,
                group_rank=number,
                groups=len(peers),
                first=first,
                ranks=ranks,
                address=address,
                port=message["port"],
            )
            first += len(other.slots)

    def _on_done(self, peer: Peer, message: Message) -> None:
        """Record that the host's ranks are done; once those of all present hosts are, have the hosts finish. No host
        finishes during a restart."""
        peer.state = "done"
        if not self._restarting and all(other.state == "done" for other in self._roster.present):
            self._finishing = True
            for other in self._roster.present:
                other.send("finish")

    def _restart(self) -> bool:
        """Have the hosts begin another attempt, at once if no host has begun this one; return False, and do nothing, if
        no restarts or too few hosts are left, or the job ends anyway."""
        enough = len(self._roster.present) >= self._minimum
        ends = self._finishing or self._stopping is not None
        if self._attempt >= self._spec.job.max_restarts or ends or not enough:
            return False
        self._restarting = True
        self._attempt += 1
        for peer in self._roster.present:
            if peer.state in ("running", "done"):
                peer.send("restart")
        if all(peer.state == "ready" for peer in self._roster.present):
            self._begin_round()
        return True

    def _lose(self, peer: Peer, why: str) -> None:
        """Give up a host that had begun: count its ranks as failed, for ``why``, at its last message, and restart or
        stop the job.

        During a restart, begin the next round instead if all others are ready, or stop the job if too few hosts are
        left. Before its ranks run no rank has failed: then do the same, and print ``why`` if the job continues.
        """
        if not self._restarting and peer.state not in ("running", "done"):
            peer.state = "lost"
            if self._stopping is None:
                self._continue_without(why)
            if self._stopping is None:
                self._say(why)
            return
        heard_at = time.time() - (0.0 if peer.channel is None else peer.channel.silence)
        ended_well = peer.state == "done"
        peer.state = "lost"
        seconds = heard_at - self._began_at
        detail = peer.stderr_tail()
        for rank, pid in sorted(peer.ranks.items()):
            self._lost.append((heard_at, RankFailure(rank, peer.name, pid, None, why, detail, seconds)))
            detail = ""
        if self._stopping is not None:
            return
        if not peer.ranks or ended_well:
            self._troubles.append(why)
        if self._restarting:
            self._continue_without(why)
        elif not self._restart():
            self._stop(why)

    def _continue_without(self, why: str) -> None:
        """Begin the next round if all hosts that are left are ready; stop the job, for ``why``, if they are too few."""
        if len(self._roster.present) < self._minimum:
            self._restarting = False
            self._stop(why)
        elif all(peer.state == "ready" for peer in self._roster.present):
            self._begin_round()
