"""The hosts of one job: the launcher's connection to each, and which still take part."""

from __future__ import annotations

import time

from zero_launch.addresses import Addresses
from zero_launch.channel import BEAT_SECONDS
from zero_launch.facts import versions
from zero_launch.peers import Inbox, Listener, Peer, call
from zero_launch.spec import ClusterSpec

START_SECONDS = 120.0
"""How long a host may take to come by itself, or to say a word while it imports torch."""


class Roster:
    """All hosts of a job, ``peers``, by their keys (`Peer.key`), lost ones included. Their messages go into ``inbox``.

    The hosts of ``spec`` are started by the launcher; with `--no_ssh` nodes 1 to N-1 connect by themselves.
    """

    def __init__(self, spec: ClusterSpec, inbox: Inbox) -> None:
        self._spec = spec
        self._inbox = inbox
        self._come_by_themselves = [Peer(str(number), ()) for number in range(1, spec.nodes)]
        self._listener: Listener | None = None
        self._looked_at = time.monotonic()
        self._judge_at = 0.0
        self.peers = {name: Peer(name, slots) for name, slots in spec.hosts.hosts.items()}
        self.peers.update({peer.key: peer for peer in self._come_by_themselves})
        self.addresses = Addresses(spec)

    @property
    def present(self) -> list[Peer]:
        """The hosts that have neither ended nor been lost."""
        return [peer for peer in self.peers.values() if peer.present]

    @property
    def slots(self) -> int:
        """The number of ranks for which all hosts together have room, lost and ended ones included."""
        return sum(len(peer.slots) for peer in self.peers.values())

    @property
    def seconds_to_greet(self) -> float:
        """Seconds that the hosts have to send their hello, from the start of their agents."""
        return START_SECONDS if self._come_by_themselves else self._spec.transport.connect_seconds + 20

    @property
    def store_port(self) -> int:
        """The port for the ranks' store: the one that ``spec`` names, or 0 for any. It is 0 where hosts come by
        themselves, as the launcher listens at the named one."""
        return 0 if self._come_by_themselves else self._spec.master_port

    def connects_by_itself(self, peer: Peer) -> bool:
        """Return whether this host is started by hand or by a scheduler and connects to us, instead of being called."""
        return peer in self._come_by_themselves

    def start_agents(self) -> None:
        """Start the launcher's agent on each host, or listen for hosts that connect by themselves. Call it once.

        Hellos and other messages arrive in the inbox. Raises OSError if this process cannot listen.
        """
        spec = self._spec
        if self._come_by_themselves:
            own = self.addresses.of_launcher()
            self._listener = Listener(
                self._inbox, address=own, port=spec.master_port, token=spec.token, nodes=self._come_by_themselves
            )
            self.addresses.listening = self._listener.address
        elif not spec.transport.carries_input:
            self._listener = Listener(self._inbox)
        for peer in self.peers.values():
            self._call_or_await(peer)

    def renew(self, peer: Peer) -> Peer:
        """Replace the lost host ``peer`` in ``peers`` by a new `Peer` of the same name, under another key at the end,
        start the host's agent again or wait until it connects, and return the new one. The old start command is killed.
        """
        new = Peer(peer.name, peer.slots, generation=peer.generation + 1)
        self.peers = {key: other for key, other in self.peers.items() if other is not peer} | {new.key: new}
        peer.kill_start_command()
        if self.connects_by_itself(peer):
            self._come_by_themselves[self._come_by_themselves.index(peer)] = new
        self._call_or_await(new)
        return new

    def _call_or_await(self, peer: Peer) -> None:
        """Start the launcher's agent on the host or, if the host connects by itself, let the listener accept it."""
        if not self.connects_by_itself(peer):
            listener = None if self._spec.transport.carries_input else self._listener
            call(peer, self._spec.transport, self._inbox, listener, ignores_signals=self._spec.job.requeue)
        elif self._listener is not None:
            self._listener.await_peer(peer)

    def waiting(self) -> str:
        """Return a remark about the hosts that have not sent their hello yet, with the address where they connect."""
        names = [peer.name for peer in self.peers.values() if peer.state == "called"]
        kind, where = ("hosts", "")
        if self._come_by_themselves and self._listener is not None:
            kind, where = "nodes", f" at {self._listener.address}:{self._listener.port}"
        return f"waiting for {len(names)} of {len(self.peers)} {kind}{where}: {', '.join(names)}"

    def silent(self) -> list[tuple[Peer, float]]:
        """Return the hosts that have been silent for too long, each with the seconds of silence.

        Too long is the job's `silence_seconds`, or two minutes for a host that has not begun its part of the job. Right
        after this process itself was stopped for a while the list is empty: messages may still wait to be read.
        """
        now = time.monotonic()
        held_up, self._looked_at = now - self._looked_at > BEAT_SECONDS, now
        if held_up:
            self._judge_at = now + BEAT_SECONDS
        if now < self._judge_at:
            return []
        found = []
        for peer in self.present:
            limit = START_SECONDS if peer.state in ("called", "greeted") else self._spec.job.silence_seconds
            if peer.channel is not None and (silence := peer.channel.silence) > limit:
                found.append((peer, silence))
        return found

    def close(self) -> None:
        """Close the connections to all hosts, end their start commands, and stop listening."""
        for peer in self.peers.values():
            peer.close()
        if self._listener is not None:
            self._listener.close()


def other_version(theirs: dict[str, str]) -> str | None:
    """Return a text about the first package, of torch and the zero packages, that a host has in another version than
    this one; None if all are equal. The launcher and the host print it.

    ``theirs``: package -> version, of the packages that the host has.
    """
    here = versions()
    for package in sorted(here.keys() | theirs.keys()):
        mine, other = here.get(package, "not installed"), theirs.get(package, "not installed")
        if mine != other:
            return f"{package} is {other} on that host and {mine} where the launcher runs; install the same"
    return None
