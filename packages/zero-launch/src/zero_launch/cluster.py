"""A job on several hosts, seen from the launcher: call the hosts, lead them through rounds, and end them all."""

from __future__ import annotations

import abc
import dataclasses
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from zero_launch.desync import FlightRecord, explain
from zero_launch.heard_signals import HeardSignals
from zero_launch.messages import Message
from zero_launch.outcome import describe_abandoned, failures_in_order, flight_records, job_error, notes
from zero_launch.peers import Inbox, Peer, title
from zero_launch.presence import WAIT_SECONDS, Presence
from zero_launch.record import record_interruption
from zero_launch.repeated_failures import RepeatedFailures
from zero_launch.report import LaunchError, RankFailure, signal_name, status_name
from zero_launch.requeue import SIGNALS, LeftEarly, Requests
from zero_launch.roster import Roster, other_version
from zero_launch.spec import ClusterSpec

_POLL_SECONDS = 0.2


class Cluster(abc.ABC):
    """The launcher's side of a job on several hosts; `run` runs it once. ``spec``: the job, its hosts and its options.

    An attempt, or round, is one start of all ranks on the hosts that take part, which subclasses choose
    (fixed_cluster.py, elastic_cluster.py). A `Peer` is the launcher's record of one host; the host is present until it
    has ended or is lost (`Peer.state`). `_on_KIND(peer, message)` handles the host's message of that kind, whose fields
    messages.py lists. The roster holds all hosts. A host that does not begin is dropped, one that is gone later is
    lost. Ranks meet at their store, torch's TCPStore on one of the hosts. To stop the job is to end it on every host,
    with the reason in the report (`_stop`); to say something is to print it on standard error.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._inbox: Inbox = Inbox()
        self._job_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self._signals = HeardSignals(self._inbox, requeue=spec.job.requeue)
        self._roster = Roster(spec, self._inbox)
        self._presence = Presence(0, "")
        self._attempt = 0
        self._began_at = time.time()
        self._restarting = False
        self._finishing = False
        self._stopping: str | None = None
        self._interrupted: int | None = None
        self._asked_to_end = False
        self._requests = Requests()
        self._left = False
        self._divergence: str | None = None
        self._repeated_failures = RepeatedFailures()
        self._lost: list[tuple[float, RankFailure]] = []
        self._troubles: list[str] = []
        self._handlers: dict[str, Callable[[Peer, Message], None]] = {
            "hello": self._on_hello,
            "environment": self._on_environment,
            "ready": self._on_ready,
            "started": self._on_started,
            "lines": self._on_lines,
            "failed": self._on_failed,
            "stalled": self._on_stalled,
            "notice": self._on_notice,
            "presence": self._on_presence,
            "asked": self._on_asked,
            "done": self._on_done,
            "ended": self._on_ended,
            "refused": self._on_refused,
            "eof": self._on_eof,
        }

    # -- from start to end

    def run(self) -> None:
        """Run the job: call the hosts, lead them through its attempts, and end it everywhere. Return when every rank
        has ended with status 0; raise as `launch_cluster` does."""
        self._check_job()
        self._signals.take()
        try:
            self._roster.start_agents()
            self._greet_all()
            if self._stopping is None:
                self._lead()
            self._end_all()
        finally:
            self._roster.close()
            self._signals.give_back(held=self._asked_to_end)
        self._report_end()

    def _check_job(self) -> None:
        """Check the job before any host is contacted: raise ValueError if the host list is shorter than `_minimum`, or
        if the job has a `LaunchSpec.direct_rank`; FileNotFoundError if the transport's program (such as ssh) is not in
        PATH."""
        self._spec.transport.check()
        if self._spec.job.direct_rank is not None:
            raise ValueError("direct_rank: on several hosts no rank can have the terminal; leave it out")
        if self._minimum > len(self._roster.peers):
            listing = ", ".join(self._roster.peers)
            raise ValueError(
                f"{self._minimum} hosts are needed, but the host list has {len(self._roster.peers)}: {listing}"
            )

    def _greet_all(self) -> None:
        """Wait for the hosts' hellos, drop the hosts that send none in time and print why, and send the job to the
        others; stop the job if they are fewer than `_minimum`."""
        end = time.monotonic() + self._roster.seconds_to_greet
        say_at = time.monotonic() + WAIT_SECONDS
        while self._stopping is None and any(peer.state == "called" for peer in self._roster.peers.values()):
            if time.monotonic() > say_at:
                say_at = end
                self._remark(self._roster.waiting())
            if time.monotonic() > end:
                for peer in self._roster.peers.values():
                    if peer.state == "called":
                        self._drop(peer, f"{title(peer)} did not answer in time")
            self._next_message()
        if self._stopping is not None:
            return
        minimum = self._minimum
        if len(self._roster.present) < minimum:
            self._stop(
                f"{len(self._roster.present)} of {len(self._roster.peers)} hosts can take part, {minimum} are needed"
            )
            return
        for trouble in self._troubles:
            self._say(trouble)
        self._troubles.clear()
        for peer in self._roster.present:
            self._send_job(peer)

    @property
    @abc.abstractmethod
    def _minimum(self) -> int:
        """The fewest hosts with which the job begins."""

    def _send_job(self, peer: Peer) -> None:
        """Send the host the message `job`, with the host's number of ranks and its devices; and after it `end`, if the
        ranks have been asked to save and leave already."""
        job = self._spec.job
        env = dict(job.env)
        if self._spec.bind_devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, peer.slots))
        fields = dataclasses.asdict(dataclasses.replace(job, nproc=len(peer.slots), env=env, direct_rank=None))
        colour = sys.stdout.isatty(), sys.stderr.isatty()
        peer.send(
            "job",
            job_id=self._job_id,
            spec=fields,
            how=job.kind,
            variables=dict(self._spec.variables),
            colours=colour,
            host=peer.name,
            generation=peer.generation,
            address=self._roster.addresses.of_local_host(peer) or peer.hello["address"],
            elastic=self._terms(peer),
        )
        if self._asked_to_end:
            peer.send("end")

    @abc.abstractmethod
    def _terms(self, peer: Peer) -> dict[str, Any] | None:
        """Return the fields that the host needs to meet the others of an elastic job, as plain data: its ``place`` and
        ``address``, the bounds of a round, and its ranks' imports (see `ElasticCluster._terms`); None in other
        jobs."""

    @abc.abstractmethod
    def _lead(self) -> None:
        """Handle messages and lost hosts until the job is to stop or is over. `run` calls it once, after
        `_greet_all`."""

    def _end_all(self) -> None:
        """Tell the present hosts to end their processes, and handle messages until no host is present, at most for the
        job's grace period and twice its `silence_seconds`."""
        for peer in self._roster.present:
            peer.send("stop")
        end = time.monotonic() + self._spec.job.grace_seconds + 2 * self._spec.job.silence_seconds
        while self._roster.present and time.monotonic() < end:
            self._next_message()
            self._lose_silent_hosts()

    def _report_end(self) -> None:
        """Report how the job ended, which is over on every host: if it succeeded, print the hosts' notes and return,
        or raise LeftEarly if its ranks saved and left. If a signal interrupted it, write the report of a recorded job
        and raise that signal in this process. Else raise LaunchError."""
        failures = self._failures()
        peers = list(self._roster.peers.values())
        if self._interrupted is not None:
            ended_by = f"interrupted by {signal_name(self._interrupted)}"
            self._say(f"{ended_by}; every process of the job has ended on every host")
            if (report := record_interruption(self._spec.job.env, ended_by, flight_records(peers))) is not None:
                self._say(f"report: {report}")
            signal.raise_signal(self._interrupted)
            raise LaunchError([], self._world_size, [ended_by])
        if self._stopping is None and not failures:
            for note in notes(peers):
                self._say(note)
            if self._left:
                raise LeftEarly
            return
        raise job_error(
            peers,
            failures,
            self._world_size,
            stopped=self._stopping,
            troubles=self._troubles,
            divergence=self._divergence,
            asked=self._asked_to_end,
        )

    # -- what hosts say

    def _next_message(self) -> None:
        """Handle the next message or signal, if one comes within `_POLL_SECONDS`."""
        try:
            name, message = self._inbox.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        if message["kind"] == "signal":
            self._handle_signal(message["signal"])
        else:
            self.hear(name, message)

    def _handle_signal(self, signum: int) -> None:
        """Act on the signal ``signum`` to this process: have the ranks save and leave, or stop the job; see [Note:
        requeue signals] in requeue.py."""
        if not (self._spec.job.requeue and signum in SIGNALS):
            self._interrupted = signum
            self._stop(f"interrupted by {signal_name(signum)}")
            return
        meaning = self._requests.hear(signum)
        if meaning == "ask":
            self._ask_to_end(signal_name(signum))
        elif meaning == "now":
            self._stop("SIGTERM again: ended at once")

    def _ask_to_end(self, why: str) -> None:
        """Tell every host, once, that its ranks are to save and leave; print ``why``."""
        if not self._asked_to_end:
            self._asked_to_end = True
            self._say(f"{why}: the ranks save a checkpoint after this step, and end")
            for peer in self._roster.present:
                peer.send("end")

    def hear(self, name: str, message: Message) -> None:
        """Handle a message of the host whose key in the roster is ``name``. If that host is no longer present, answer
        its hello with `stop` and ignore other messages. A host that sends a message of an unknown kind is lost."""
        peer = self._roster.peers.get(name)
        if peer is None or not peer.present:
            if peer is not None and peer.channel is not None and message["kind"] == "hello":
                peer.channel.send("stop", why="the job has begun without this node")
            return
        handler = self._handlers.get(message["kind"])
        if handler is None:
            self._lose(peer, f"{title(peer)} was lost: it said {message['kind']!r}, which no host of this job says")
        else:
            handler(peer, message)

    def _on_hello(self, peer: Peer, message: Message) -> None:
        """Note that the host answers (state `greeted`), or tell it to stop and drop it if a package there has another
        version than here."""
        peer.hello = message
        if (other := other_version(message["versions"])) is not None:
            peer.send("stop", why=other)
            self._drop(peer, f"{title(peer)}: {other}")
            return
        peer.state = "greeted"

    def _on_asked(self, peer: Peer, message: Message) -> None:
        """Have the ranks of all hosts save and leave, as the host has been asked by a signal to end its part."""
        self._ask_to_end(f"{title(peer)} is asked to end")

    def _on_environment(self, peer: Peer, message: Message) -> None:
        """Print which variables the host keeps with values of its own, unless the job is quiet."""
        kept: dict[str, str] = message["kept"]
        if kept and not self._spec.job.quiet:
            listing = ", ".join(f"{name}={value}" for name, value in sorted(kept.items()))
            self._say(f"{title(peer)} keeps its own {listing}")

    @abc.abstractmethod
    def _on_ready(self, peer: Peer, message: Message) -> None:
        """Note that the host is ready for the next attempt, keep its report of the attempt before, and begin the next
        one when all hosts for it are ready."""

    def _is_hopeless(self, number: int) -> bool:
        """Count a failed attempt, and return whether a restart cannot help, because the last attempts failed alike or
        ranks waited for others that had ended with status 0; stop the job then. ``number``: of the restart, from 1."""
        failures = self._failures()
        self._divergence = describe_abandoned(list(self._roster.peers.values()), failures, self._began_at)
        if self._divergence is not None:
            self._stop(self._divergence)
            return True
        why = self._repeated_failures.count_attempt(failures, self._spec.job.max_restarts - number + 1)
        if why is not None:
            self._troubles.append(why)
            self._stop(why)
        return why is not None

    def _on_started(self, peer: Peer, message: Message) -> None:
        """Keep the pids of the host's ranks, which have started, in ``peer.ranks``."""
        peer.ranks = {int(rank): pid for rank, pid in message["pids"].items()}

    def _on_lines(self, peer: Peer, message: Message) -> None:
        """Write the ranks' output to this process's stdout or stderr."""
        stream = sys.stdout if message["stream"] == "stdout" else sys.stderr
        stream.write(message["text"])
        stream.flush()

    def _on_failed(self, peer: Peer, message: Message) -> None:
        """Start all ranks again, as some of the host's failed. If the ranks diverged or no restart is possible, tell
        the other hosts to stop. Does nothing about an earlier attempt."""
        if message["attempt"] != self._attempt:
            return
        if message["divergence"] is not None and self._divergence is None:
            self._divergence = message["divergence"]
            self._say(message["divergence"])
        if self._divergence is not None or not self._restart():
            for other in self._roster.present:
                if other is not peer:
                    other.send("stop")

    @abc.abstractmethod
    def _restart(self) -> bool:
        """Begin another attempt if restarts and enough hosts remain; return whether it begins."""

    def _on_stalled(self, peer: Peer, message: Message) -> None:
        """Keep the flight records of the host's ranks, and whether they are stalled (wait without progress). Once all
        hosts are, compare the records, and stop the job if they show why."""
        peer.stalled = message["stalled"]
        peer.records = {int(rank): FlightRecord.from_json(data) for rank, data in message["records"].items()}
        records = flight_records(self._roster.present)
        if all(other.stalled for other in self._roster.present):
            self._divergence = explain(records, stalled=len(records) == self._world_size)
            if self._divergence is not None:
                self._say(self._divergence)
                self._stop("the ranks diverged")

    def _on_notice(self, peer: Peer, message: Message) -> None:
        """Print the text of the message, with the host's name behind it."""
        self._remark(f"{message['text']} on {peer.name}")

    def _on_presence(self, peer: Peer, message: Message) -> None:
        """Note which ranks of the host have connected to the store or ended, unless that was in another attempt."""
        if message["attempt"] == self._attempt:
            self._presence.update(message["arrived"], message["ended"])

    def _remark(self, text: str) -> None:
        """Print ``text`` unless the job is quiet."""
        if not self._spec.job.quiet:
            self._say(text)

    @abc.abstractmethod
    def _on_done(self, peer: Peer, message: Message) -> None:
        """Record that the host's ranks are done; once those of all hosts are, tell the hosts to finish."""

    def _on_ended(self, peer: Peer, message: Message) -> None:
        """Keep what the host reports of its ranks' ends, and note that it has ended; stop the job if its part
        failed."""
        if peer.state == "ready":
            peer.failures = []  # it has said them before
        peer.failures += message["failures"]
        peer.fates, peer.notes, peer.folder = message["fates"], message["notes"], message.get("folder", "")
        peer.records = {int(rank): FlightRecord.from_json(data) for rank, data in message["records"].items()}
        self._divergence = self._divergence or message.get("divergence")
        self._left = self._left or message.get("left") is not None
        peer.state = "ended"
        if message["failed"] and self._stopping is None:
            why = message.get("why")
            self._stop(f"{title(peer)} failed" + (f": {why}" if why else ""))

    def _on_refused(self, peer: Peer, message: Message) -> None:
        """Drop the host and stop the job: the host cannot run it."""
        self._drop(peer, f"{title(peer)}: {message['why']}")
        self._stop(f"{title(peer)} cannot run the job")

    def _on_eof(self, peer: Peer, message: Message) -> None:
        """Give up the host, whose connection has ended: `_drop` one that never said hello, `_lose` any other."""
        status = peer.exit_status()
        if peer.state == "called":
            why = message["why"] if status is None else self._spec.transport.explain(status)
            self._drop(peer, "\n".join([f"{title(peer)}: {why}", *(f"  | {line}" for line in peer.errors)]))
            return
        how = "" if status is None else f" ({self._spec.transport.launcher} ended with {status_name(status)})"
        self._lose(peer, f"{title(peer)} was lost: {message['why']}{how}")

    # -- losing hosts

    def _lose_silent_hosts(self) -> None:
        """Give up the hosts that were silent for too long, and close the channels to them: a host that was only stopped
        for a while could otherwise read waiting messages and believe that it still takes part."""
        for peer, seconds in self._roster.silent():
            channel = peer.channel
            self._lose(peer, f"{title(peer)} was lost: no sign of life for {seconds:.1f} s")
            if channel is not None:
                channel.close(0.0)

    def _drop(self, peer: Peer, why: str) -> None:
        """Give up a host that never began, and keep ``why`` for the report."""
        peer.state = "lost"
        self._troubles.append(why)

    @abc.abstractmethod
    def _lose(self, peer: Peer, why: str) -> None:
        """Give up a host that had begun: count its ranks as failed, for ``why``, at its last message, and restart or
        stop the job."""

    @property
    @abc.abstractmethod
    def _world_size(self) -> int:
        """The number of ranks of the attempt that runs or ran last."""

    def _stop(self, why: str) -> None:
        """Have the job end on every host, with ``why`` in its report; only the first call counts."""
        if self._stopping is None:
            self._stopping = why

    def _failures(self) -> list[RankFailure]:
        """Return the ranks that failed by themselves, in the order of their failures."""
        return failures_in_order(list(self._roster.peers.values()), self._lost, self._began_at)

    def _say(self, text: str) -> None:
        """Print a line of the launcher's on standard error."""
        print(f"zero-launch: {text}", file=sys.stderr, flush=True)
