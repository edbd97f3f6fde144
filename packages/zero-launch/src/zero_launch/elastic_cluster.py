"""A job whose hosts come and go: lost hosts are called again, and the ranks meet again with those that are there."""

from __future__ import annotations

import time
from typing import Any

from zero_launch.cluster import Cluster
from zero_launch.held_questions import HeldQuestions
from zero_launch.host_bounds import host_bounds
from zero_launch.meeting_state import VersionedState, on_another_clock, places_in
from zero_launch.messages import Message
from zero_launch.outcome import failures_in_order
from zero_launch.peers import Peer, title
from zero_launch.presence import Presence
from zero_launch.report import LaunchError, RankFailure
from zero_launch.sockets import LOOPBACK
from zero_launch.spec import ClusterSpec

CALL_AGAIN_SECONDS = 5.0
MEET_SECONDS = 600
"""How long a job waits for hosts while none of its ranks run."""
_LAST_CALL_SECONDS = 10.0
"""How long the first host that is back after all were lost waits for the others."""


class ElasticCluster(Cluster):
    """A `Cluster` whose hosts come and go. ``spec``: the job, its hosts and its options. Raises ValueError as
    `host_bounds` does.

    torch's rendezvous decides which hosts take part in a round (an attempt with a fixed set of hosts). Its state is
    kept here in ``_meeting``, and names a host by its place: its number in the host list, as text. A lost host is
    called again, that is its agent is started once more, or it connects by itself.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
        if spec.job.elastic is None:
            raise ValueError("elastic: expected the least and the most ranks, got None")
        self._least_ranks, self._most_ranks = spec.job.elastic
        self._least, self._most = host_bounds(self._slots(), self._least_ranks, self._most_ranks)
        self._meeting = VersionedState()
        self._places = {peer.name: f"{number:05d}" for number, peer in enumerate(self._roster.peers.values())}
        self._leading = False
        self._over = False
        self._rounds = 0
        self._ranks = 0
        self._restarts = 0
        self._calls: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._imports: dict[str, Message] = {}
        self._questions = HeldQuestions(self._meeting, self._places)
        self._ran_at = time.monotonic()
        self._all_lost = False
        self._last_call: float | None = None
        self._handlers |= {
            "started": self._on_started,
            "state": self._on_state,
            "served": self._on_served,
            "imported": self._on_imported,
        }

    @property
    def _minimum(self) -> int:
        """The fewest hosts that may train."""
        return self._least

    def _terms(self, peer: Peer) -> dict[str, Any] | None:
        """Return what this host needs to meet the others, never None: its ``place`` among the job's hosts, the
        ``address`` at which they reach it, the fewest and most hosts of a round (``least``, ``most``), and what its
        ranks had imported (``imports``), for its standby processes."""
        address = self._roster.addresses.of_local_host(peer) or peer.hello["address"] or LOOPBACK
        return {
            "place": self._places[peer.name],
            "address": address,
            "least": self._least,
            "most": self._most,
            "imports": self._imports.get(peer.name, {}),
        }

    def _drop(self, peer: Peer, why: str) -> None:
        """Give up a host that never began: once the job is led (`_lead`), print ``why`` and call the host again later,
        before that keep ``why`` for the report."""
        peer.state = "lost"
        if self._leading:
            self._keep_reason(peer, why)
            self._call_later(peer)
        else:
            self._troubles.append(why)

    def _keep_reason(self, peer: Peer, why: str) -> None:
        """Keep ``why`` a host does not take part, and print it unless it is the same as the last time."""
        if self._reasons.get(peer.name) != why:
            self._reasons[peer.name] = why
            self._remark(why)

    def _call_later(self, peer: Peer) -> None:
        """Call a lost host again after `CALL_AGAIN_SECONDS`, or let it connect by itself; not once the job stops."""
        if self._stopping is not None:
            return
        if self._roster.connects_by_itself(peer):
            self._roster.renew(peer)
        else:
            self._calls[peer.name] = time.monotonic() + CALL_AGAIN_SECONDS

    def _call_again(self) -> None:
        """Call the lost hosts that `_call_later` has scheduled and whose time has come."""
        now = time.monotonic()
        for name in [name for name, at in self._calls.items() if now >= at]:
            del self._calls[name]
            lost = next(peer for peer in self._roster.peers.values() if peer.name == name)
            self._roster.renew(lost)

    def _on_hello(self, peer: Peer, message: Message) -> None:
        """Note that the host answers, as `Cluster` does, and send it the job if the job is led already (`_lead`); tell
        it to stop and drop it if it brings too many ranks."""
        super()._on_hello(peer, message)
        if peer.state != "greeted":
            return
        why = self._has_too_many(peer)
        if why is not None:
            peer.send("stop", why=why)
            peer.slots = ()
            self._drop(peer, f"{title(peer)}: {why}")
        elif self._leading:
            self._send_job(peer)

    def _slots(self) -> list[int]:
        """Return the number of ranks of each host; this launcher's own number for a node that has not come yet."""
        return [len(peer.slots) or self._spec.job.nproc for peer in self._roster.peers.values()]

    def _has_too_many(self, peer: Peer) -> str | None:
        """Return a text about why the ranks that a host brings are too many for the job; None if they are not. Before
        the job is led (`_lead`), also set the fewest and most hosts of a round, for the ranks that the hosts bring."""
        slots = self._slots()
        if self._leading:
            most = sum(sorted(slots, reverse=True)[: self._most])
            if most <= self._most_ranks:
                return None
            return (
                f"with its {len(peer.slots)} ranks the job could have {most}, and may have {self._most_ranks}; "
                "start it with the --nproc that it had"
            )
        try:
            self._least, self._most = host_bounds(slots, self._least_ranks, self._most_ranks)
        except ValueError as error:
            return str(error)
        return None

    def _lead(self) -> None:
        """Handle messages and lost hosts, call lost hosts again, and answer the hosts' requests, until the job is over
        or is to stop. Stop it after `MEET_SECONDS` in which no rank ran."""
        self._leading = True
        for peer in [peer for peer in self._roster.peers.values() if peer.state == "lost"]:
            self._call_later(peer)
        while self._stopping is None and not self._over:
            self._next_message()
            self._lose_silent_hosts()
            self._call_again()
            self._update_expected_hosts()
            self._questions.answer()
            for text in self._presence.remarks():
                self._remark(text)
            if any(peer.state in ("running", "done") for peer in self._roster.present):
                self._ran_at = time.monotonic()
            elif time.monotonic() - self._ran_at > MEET_SECONDS:
                there = sum(len(peer.slots) for peer in self._roster.present)
                self._troubles += self._reasons.values()
                self._stop(f"no round in {MEET_SECONDS} s: {there} ranks can take part, {self._least_ranks} are needed")

    def _end_all(self) -> None:
        """Give up the hosts that have not come yet, and do as `Cluster._end_all` for the others."""
        for peer in self._roster.present:
            if peer.state == "called":
                peer.state = "lost"
                peer.kill_start_command()
        super()._end_all()

    def _on_state(self, peer: Peer, message: Message) -> None:
        """Replace the rendezvous's state by the host's new one, if the host has seen the newest, and queue the host's
        request for an answer. A host is lost if its state names a place that this job does not have."""
        strange = places_in(message["state"]) - set(self._places.values())
        if strange:
            self._lose(peer, f"{title(peer)} was lost: it knows of places that this job has not: {sorted(strange)[:4]}")
            return
        state = on_another_clock(message["state"], peer.clock_offset)
        replaced = state is not None and self._meeting.replace(state, message["version"])
        if replaced:
            self._update_expected_hosts()
        self._questions.add(peer, message["number"], replaced=replaced)

    def _on_imported(self, peer: Peer, message: Message) -> None:
        """Keep the modules that the host's standby processes import, for its next agent if it is lost and comes
        back."""
        self._imports[peer.name] = message["imports"]

    def _update_expected_hosts(self) -> None:
        """Set in the rendezvous's state which hosts the next round waits for, so that it begins once they are there.

        They are the hosts that are ready or run and, before the first round, those that are getting ready. If all hosts
        were lost, they are all hosts, until ten seconds after the first is back.
        """
        peers = list(self._roster.peers.values())
        waits_for_all = self._all_lost and (self._last_call is None or time.monotonic() <= self._last_call)
        if waits_for_all:
            expected = [self._places[peer.name] for peer in peers]
        else:
            counted = ("ready", "running", "done") if self._rounds else ("greeted", "ready", "running", "done")
            expected = [self._places[p.name] for p in peers if p.present and p.state in counted][: self._most]
        slots = {self._places[peer.name]: len(peer.slots) for peer in peers}
        self._meeting.review(expected, slots, self._least_ranks)

    def _on_ready(self, peer: Peer, message: Message) -> None:
        """Note that the host is ready for the next round and keep its report of the attempt before; unless a restart is
        under way, have running ranks leave for a larger round (`_ask_to_grow`)."""
        if self._rounds and peer.state == "greeted":
            self._remark(f"{title(peer)} is back")
        self._reasons.pop(peer.name, None)
        peer.state = "ready"
        if self._all_lost and self._last_call is None:
            self._last_call = time.monotonic() + _LAST_CALL_SECONDS
        peer.take_report(message)
        self._update_expected_hosts()
        if not self._restarting:
            self._ask_to_grow()

    def _on_started(self, peer: Peer, message: Message) -> None:
        """Keep the pids of the host's ranks, and ask the hosts again to grow (`_ask_to_grow`), as a host ignores that
        before its ranks run."""
        super()._on_started(peer, message)
        self._ask_to_grow()

    def _ask_to_grow(self) -> None:
        """If a host waits for a round and the job may have more hosts, tell the hosts whose ranks run to have them
        leave at their next checkpoint, for a larger round."""
        running = [peer for peer in self._roster.present if peer.state == "running"]
        waits = any(peer.state == "ready" for peer in self._roster.present)
        if waits and running and len(running) < self._most:
            for peer in running:
                peer.send("grow", attempt=self._attempt)

    def _on_served(self, peer: Peer, message: Message) -> None:
        """Begin the round that the hosts have agreed on: ``peer``, its first host, has opened the store, so send all
        members their ranks and the store's address.

        Does nothing if ``peer`` is no member. If members were lost meanwhile and the others have too few ranks, all
        meet again. If this is a restart that cannot help (`_is_hopeless`), the job is stopped instead.
        """
        takes_part = self._meeting.participants
        members = [
            p for p in self._roster.present if p.state in ("ready", "running") and self._places[p.name] in takes_part
        ]
        if peer not in members:
            return
        ranks = sum(len(member.slots) for member in members)
        if ranks < self._least_ranks:
            self._meeting.dissolve()
            return
        if self._restarting and self._is_hopeless(self._restarts):
            return
        self._announce_restart()
        if self._rounds and not self._restarting:
            self._attempt += 1
        self._rounds += 1
        self._restarting = self._all_lost = False
        self._last_call = None
        self._began_at = time.time()
        self._ranks = ranks
        address = (self._terms(peer) or {})["address"]
        self._presence = Presence(self._ranks, f"{address}:{message['port']}")
        self._remark(
            f"round {self._attempt}: {self._ranks} ranks on {', '.join(m.name for m in self._in_host_order(members))}"
        )
        for other in self._roster.peers.values():
            other.forget_attempt()
        first = 0
        for member in self._in_host_order(members):
            member.state = "running"
            member.send(
                "meet",
                round=message["round"],
                attempt=self._attempt,
                first=first,
                ranks=self._ranks,
                address=address,
                port=message["port"],
            )
            first += len(member.slots)
        self._ask_to_grow()

    def _in_host_order(self, peers: list[Peer]) -> list[Peer]:
        """Return the hosts in the host list's order."""
        return sorted(peers, key=lambda peer: self._places[peer.name])

    def _announce_restart(self) -> None:
        """Print the failure that led to this restart, with the restart's number, and forget the failure; do nothing if
        the round is no restart."""
        if self._restarting:
            error = LaunchError(self._failures(), self._world_size, divergence=self._divergence)
            self._say(f"{error}\nzero-launch: restart {self._restarts} of {self._spec.job.max_restarts}")
            self._divergence = None
            self._lost.clear()

    def _on_failed(self, peer: Peer, message: Message) -> None:
        """Start all ranks again, as some of the host's failed; if that is not possible, tell every host to stop,
        ``peer`` too. Does nothing if that was an earlier attempt, or while a restart is under way."""
        if message["attempt"] == self._attempt and not self._restarting:
            super()._on_failed(peer, message)
            if not self._restarting:
                peer.send("stop")  # it would come to the next round otherwise

    def _restart(self) -> bool:
        """Have the hosts whose ranks run or are done begin another attempt, and return True; return False, and do
        nothing, if no restarts are left or the job ends anyway."""
        if self._restarts >= self._spec.job.max_restarts or self._finishing or self._stopping is not None:
            return False
        self._restarts += 1
        self._restarting = True
        for peer in self._roster.present:
            if peer.state in ("running", "done"):
                peer.send("again", attempt=self._attempt)
        self._attempt += 1
        return True

    def _lose(self, peer: Peer, why: str) -> None:
        """Give up a host and, unless the job stops, call it again later. If its ranks ran or were done, they count as
        failed when it was last heard: all ranks restart, unless they do already, or the job stops without restarts."""
        before, peer.state = peer.state, "lost"
        self._meeting.lost(self._places[peer.name])
        if before in ("running", "done"):
            heard_at = time.time() - (0.0 if peer.channel is None else peer.channel.silence)
            for rank, pid in sorted(peer.ranks.items()):
                failure = RankFailure(rank, peer.name, pid, None, why, "", heard_at - self._began_at)
                self._lost.append((heard_at, failure))
            self._remark(why)
            if not self._restarting and not self._restart():
                self._stop(why)
        else:
            self._keep_reason(peer, why)
        if not any(other.state in ("ready", "running", "done") for other in self._roster.present):
            self._all_lost = True
        self._call_later(peer)
        self._update_expected_hosts()

    def _on_refused(self, peer: Peer, message: Message) -> None:
        """Lose the host, which cannot run the job, once rounds have begun; before that, drop it and stop the job."""
        if self._rounds:
            self._lose(peer, f"{title(peer)} was lost: {message['why']}")
        else:
            super()._on_refused(peer, message)
            self._troubles.append(f"{title(peer)}: {message['why']}")

    def _on_done(self, peer: Peer, message: Message) -> None:
        """Record that a host's ranks are done. Once no host's ranks run, have the hosts that are done finish, and
        dismiss those that wait for a round; not during a restart."""
        peer.state = "done"
        if self._restarting or any(other.state == "running" for other in self._roster.present):
            return
        self._finishing = True
        for other in self._roster.present:
            other.send("finish" if other.state == "done" else "dismiss")
            if other.state != "done":
                other.state = "ended"  # it waited for a round that does not come

    def _on_ended(self, peer: Peer, message: Message) -> None:
        """Note that the host has ended and keep its report, as `Cluster` does; a host that failed without being asked
        to end counts as lost instead, and is called again."""
        if message["failed"] and self._ended_by_itself(peer, message):
            why = message.get("why") or "it ended its ranks without being asked"
            self._keep_failures(peer, message)
            self._lose(peer, f"{title(peer)} was lost: {why}")
            return
        super()._on_ended(peer, message)
        self._over = not any(other.state in ("running", "done", "ready", "greeted") for other in self._roster.present)

    def _ended_by_itself(self, peer: Peer, message: Message) -> bool:
        """Return whether a host ended without being asked by this launcher and without diverging ranks."""
        asked = peer.asked_to_stop or self._stopping is not None
        return not asked and message.get("divergence") is None

    def _keep_failures(self, peer: Peer, message: Message) -> None:
        """Move the failures that a lost host reported in ``message`` into the job's list, and forget the host's ranks
        that failed, so that they do not count as lost as well."""
        if peer.state != "ready":  # else it has said them before
            peer.failures += message["failures"]
        for failure in failures_in_order([peer], [], self._began_at):
            self._lost.append((self._began_at + failure.seconds, failure))
            peer.ranks.pop(failure.rank, None)
        peer.failures = []

    @property
    def _world_size(self) -> int:
        """The number of ranks of the present round."""
        return self._ranks
