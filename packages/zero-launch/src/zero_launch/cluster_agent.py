"""torch's elastic agent on one of several hosts: the rules of agent.py, with every event sent to the launcher."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState

from zero_launch.agent import Agent
from zero_launch.channel import Channel, ChannelSink
from zero_launch.cores import bindings
from zero_launch.desync import FlightRecord
from zero_launch.guard import Guard
from zero_launch.job import core_variables, job_environment, standby_pool_of, worker_group_spec
from zero_launch.meeting import Meeting
from zero_launch.messages import Message
from zero_launch.orders import REGROUP
from zero_launch.rank_files import RankFiles
from zero_launch.rendezvous import LedRendezvous
from zero_launch.spec import LaunchSpec

_PREPARE_SECONDS = 60.0
"""How long a host that is back waits for its standbys before it says that it is ready without them."""
_NO_LIMIT = 1 << 30


class ClusterAgent(Agent):
    """An `Agent` for one host of several: it sends every event to the launcher, which decides about rounds (attempts),
    restarts and the end. Messages are those of messages.py. Standbys are processes that have imported what the ranks
    import, and fork them at a restart.

    ``rendezvous`` takes the launcher's orders about rounds, ``channel`` leads to the launcher. Make it by `for_host`.
    """

    rendezvous: LedRendezvous | Meeting
    channel: Channel

    @classmethod
    def for_host(
        cls,
        channel: Channel,
        spec: LaunchSpec,
        job_id: str,
        folder: Path,
        recorders: Path,
        guard: Guard,
        order: Message,
        own_signals: Sequence[signal.Signals] = (),
    ) -> ClusterAgent:
        """Return the agent for ``order``, the launcher's message `job`; ``job_id`` is the job's id on this host.

        ``spec``: the job with this host's number of ranks. ``folder``: for the ranks' files. ``recorders``: folder for
        their flight recorders. ``guard``: gets the pids of every attempt. ``own_signals``: signals whose handlers stay
        as they are when the ranks start. Raises ValueError if the ranks cannot be bound to cores (see `bindings`).
        """
        cores = bindings(spec.nproc, spec.core_list) if spec.bind_cores else []
        env = job_environment(spec, cores, job_id)
        terms = order["elastic"]
        takes_orders = terms is not None or order["spec"].get("requeue", False)
        files = RankFiles(
            folder, None, env, own_env=core_variables(cores), recorders=recorders, takes_orders=takes_orders
        )
        rendezvous: LedRendezvous | Meeting
        if terms is None:
            rendezvous = LedRendezvous(channel, order["job_id"])
        else:
            rendezvous = Meeting.of(channel, order["job_id"], terms)
            spec = dataclasses.replace(spec, max_restarts=_NO_LIMIT)  # the launcher counts

        def started(pids: Mapping[int, int]) -> None:
            """Send the pids of an attempt's processes to the guard and the launcher; ``pids``: rank -> pid."""
            guard.watch(list(pids.values()))
            channel.send("started", pids={str(rank): pid for rank, pid in pids.items()})

        worker_spec = worker_group_spec(spec, order["how"], rendezvous, None)
        files.standby_pool = standby_pool_of(
            spec, worker_spec, files, recorders, lambda text: channel.send("notice", text=text)
        )
        agent = cls(
            worker_spec,
            files,
            job_id,
            spec.grace_seconds,
            sinks=(ChannelSink(channel, "stdout"), ChannelSink(channel, "stderr")),
            colours=tuple(order["colours"]),
            host=order["host"],
            stopped_seconds=spec.silence_seconds,
            started=started,
            own_signals=own_signals,
        )
        agent.rendezvous, agent.channel = rendezvous, channel
        agent.finish = threading.Event()
        agent._said_stalled = False
        agent._success = None
        agent._said_presence = ([], [])
        agent._imports = {} if terms is None else {int(number): text for number, text in terms["imports"].items()}
        return agent

    finish: threading.Event
    """Set when every host has said that its ranks are done."""
    _success: RunResult | None
    """How the ranks of this host ended, while those of others may still fail and all begin again."""
    _said_stalled: bool
    _said_presence: tuple[list[int], list[int]]
    _imports: Mapping[int, str]
    """The modules that the ranks of this host import ahead, by local rank, as the launcher knows it."""

    @property
    def pids(self) -> list[int]:
        """The pids of this host's ranks in the attempt that runs or ran last."""
        return [record.pid for record in self._records]

    def prepare(self) -> None:
        """If this host was lost before, start standbys with its ranks' imports and wait for them, up to a minute, so
        that its ranks begin as fast as those of other hosts."""
        if self._files.standby_pool is not None and self._imports:
            self._files.standby_pool.prepare(self._imports, _PREPARE_SECONDS)

    def _prepare_restart(self) -> None:
        """Start missing standbys as `Agent` does. Also send the launcher the modules that standbys import, when these
        have changed: if this host is lost and comes back, the launcher returns them for `prepare`."""
        super()._prepare_restart()
        imports = {} if self._files.standby_pool is None else self._files.standby_pool.imports
        if imports != self._imports:
            self._imports = imports
            self.channel.send("imported", imports={str(number): text for number, text in imports.items()})

    def account(self) -> dict[str, Any]:
        """Return the fields of the message `ended` about the last attempt on this host, as plain data: the failures,
        how the other ranks ended (`fates`), the notes, why the ranks cannot continue together (`divergence`), the order
        on which all ranks left (`left`), and the flight records."""
        return {
            "failures": self._failure_messages(),
            "fates": self.fates() if self._records else [],
            "notes": self.notes,
            "divergence": self.divergence,
            "left": self.left_for,
            "records": self._record_messages(),
        }

    def _report(self) -> Message:
        """Return the fields of the message `ready` about the attempt before: failures; [rank, seconds since the epoch]
        of each rank that ended well; and flight records."""
        ended = [[record.rank, record.over_at] for record in self._records if record.ended_well]
        return {"failures": self._failure_messages(), "ended": ended, "records": self._record_messages()}

    def _failure_messages(self) -> list[Message]:
        """Return this host's failures as fields of a message, with the time of each as `at` (seconds since the
        epoch)."""
        return [{**vars(failure), "at": self._started_at + failure.seconds} for failure in self.failures()]

    def _record_messages(self) -> Message:
        """Return the flight records of this host's ranks as plain data, by rank as text."""
        return {str(rank): record.to_json() for rank, record in self._watcher.records.items()}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Report the last attempt to the launcher, wait until the launcher begins the next round, without a time limit,
        and set the number of remaining restarts by the launcher's count.
        """
        self._store = worker_group.store = None  # the last attempt's store gives its port back
        if self._records:
            self.rendezvous.report = self._report()
        self._success = None
        super()._rendezvous(worker_group)
        self._remaining_restarts = worker_group.spec.max_restarts - self.rendezvous.attempt

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return torch's description of each rank of this host, numbered as the launcher said; the arguments but
        ``spec`` are unused. torch's own version asks the other agents through the store, and hangs if a host was lost
        meanwhile."""
        first, ranks = self.rendezvous.place
        return [
            Worker(here, first + here, role_rank=first + here, world_size=ranks, role_world_size=ranks)
            for here in range(spec.local_world_size)
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the attempt on this host; end it first if a rank failed, is stuck, or cannot finish.
        Ranks that are done are reported to the launcher, and count as running until `finish` is set."""
        if self._success is None:
            result = super()._monitor_workers(worker_group)
            if result.state is not WorkerState.SUCCEEDED:
                return result
            self._success = result
            self.channel.send("done")
        return self._success if self.finish.is_set() else RunResult(state=WorkerState.HEALTHY)

    def _handle_failure(self) -> None:
        """Report the failure of this attempt to the launcher, which decides about a restart, and end the other ranks on
        this host."""
        self.channel.send("failed", attempt=self.rendezvous.attempt, divergence=self.divergence)
        self._end_ranks(signal.SIGTERM)

    def ask_to_regroup(self, attempt: int) -> None:
        """Have the ranks leave at their next checkpoint for a new round; does nothing unless ``attempt`` is the one
        that runs."""
        if attempt == self.rendezvous.attempt:
            self._files.orders.give(REGROUP)

    def _have_left(self, order: str) -> RunResult:
        """Return the result of an attempt whose ranks have ended, some on ``order``: a success, with the order kept;
        but when they left to regroup in an elastic job, begin a new round and return that they run."""
        if order == REGROUP and isinstance(self.rendezvous, Meeting):
            self.rendezvous.regroup()
            return RunResult(state=WorkerState.HEALTHY)
        return super()._have_left(order)

    def _report_delays(self, ended: Sequence[int]) -> None:
        """Send the launcher which ranks of this host are stopped, and which have connected to the store or ended, for
        its remarks about all hosts. ``ended``: the ranks with status 0."""
        self._here.find_arrivals(ended, self._watcher.records)
        for text in self._here.stopped():
            self.channel.send("notice", text=text)
        known = sorted(self._here.arrived), sorted(ended)
        if known != self._said_presence:
            self._said_presence = known
            self.channel.send("presence", attempt=self.rendezvous.attempt, arrived=known[0], ended=known[1])

    def _announce_divergence(self, why: str) -> None:
        """Do nothing: the message `failed` carries ``why`` (`_handle_failure`), and the launcher prints it."""

    def _explain_hang(self, records: Mapping[int, FlightRecord], *, stalled: bool) -> str | None:
        """Return why this host's ranks cannot finish, or None while they may, as `Agent` does. While the ranks are
        stalled, and once when they no longer are, also send their ``records`` to the launcher, which compares those of
        all hosts."""
        if stalled or self._said_stalled:
            data = {str(rank): record.to_json() for rank, record in records.items()}
            self.channel.send("stalled", stalled=stalled, records=data)
            self._said_stalled = stalled
        return super()._explain_hang(records, stalled=stalled)

    def _exit_barrier(self) -> None:
        """Do nothing: `_monitor_workers` has waited for all hosts already."""
