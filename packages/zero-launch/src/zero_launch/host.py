"""`python -m zero_launch.host`: the launcher's agent on one host of a job.

It sends hello, receives the job, and runs torch's elastic agent for the ranks of this host, led by the launcher: see
rendezvous.py for how rounds begin. Every event is sent over the channel. When the channel ends or falls silent, the
launcher or the connection to it is gone, and every process of the job on this host is ended.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import shutil
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from zero_launch.channel import Channel
from zero_launch.connection import connect
from zero_launch.environment import applied
from zero_launch.facts import examination, greeting
from zero_launch.messages import FROM_LAUNCHER, Message
from zero_launch.orders import END
from zero_launch.processes import end_job
from zero_launch.report import signal_name
from zero_launch.sockets import interface_variables
from zero_launch.spec import SILENCE_SECONDS, LaunchSpec
from zero_launch.torch_import import keep_from_collector

if TYPE_CHECKING:
    from zero_launch.cluster_agent import ClusterAgent

_FORCE_SECONDS = 2.0


class _Stopped(BaseException):
    """A signal ended the job before torch's agent had installed its signal handlers; the text says which."""


class HostSide:
    """Carries out the launcher's orders on this host: examines it, or runs its part of the job.

    ``channel``: leads to the launcher. ``inbox``: where that channel puts the launcher's messages.
    """

    def __init__(self, channel: Channel, inbox: queue.SimpleQueue[tuple[str, Message]]) -> None:
        self._channel = channel
        self._inbox = inbox
        self.cut_off: str | None = None
        """Why this host ends its part by itself, once it has lost the launcher, which counts it as lost then."""
        self._over = threading.Event()
        self._stops = False
        self._asked_to_stop = False
        self._dismissed = False
        """True once the job has ended well on other hosts while this one waited for a round."""
        self.refusal: str | None = None
        """Why the launcher does not let this host take part, if it has said so."""
        self.left = False
        """True once the job has ended because it was asked to, after saving."""

    def run(self, own_spec: LaunchSpec | None = None) -> int:
        """Serve the launcher until the job is over, and return the exit status for this process: 0 or 1.

        ``own_spec``: the job, if this host has it from its own command line; else the launcher sends it. Every failure
        is sent to the launcher. Call it in the main thread: it installs signal handlers.
        """
        order = self._first_order()
        if order["kind"] == "examine":
            sees_mark = None if order["mark"] is None else os.path.exists(order["mark"])
            self._channel.send("examination", facts=examination(os.getcwd()), sees_mark=sees_mark)
            self._channel.close()
            return 0
        if order["kind"] != "job":
            self.refusal = order.get("why") if order["kind"] == "stop" else None
            return int(order["kind"] != "dismiss")
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, _stop_early)
        try:
            return self._run_job_part(order, own_spec)
        except _Stopped as stop:
            failed = not self._dismissed
            self._channel.send("ended", failed=failed, failures=[], fates=[], notes=[], records={}, why=str(stop))
            return int(failed)
        except Exception as error:  # whatever it is, it happened before the ranks began, and the launcher reports it
            self._channel.send("refused", why=f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._over.set()
            self._channel.close()

    def _first_order(self) -> Message:
        """Wait for the launcher's first message and return it; return a message of kind `eof` if nothing, not even a
        beat, comes from the launcher for 4 s."""
        while True:
            try:
                return self._inbox.get(timeout=SILENCE_SECONDS)[1]
            except queue.Empty:
                if self._channel.silence > SILENCE_SECONDS:
                    return {"kind": "eof"}

    def _run_job_part(self, order: Message, own_spec: LaunchSpec | None) -> int:
        """Run this host's part of the job that ``order`` (a message `job`) describes; return 1 if it failed, else 0.

        Sends `ended` with the outcome, and removes the folder of logs unless they are to be kept or the ranks failed.
        Changes this process's environment. Raises what keeps the ranks from starting.
        """
        from zero_launch.cluster_agent import ClusterAgent
        from zero_launch.job import guarded, recorder_folder, run_folder, sweep

        new, retained = applied(order["variables"], os.environ)
        os.environ.update(new)
        self._channel.send("environment", kept=retained)
        job_id = _end_earlier(f"{order['job_id']}@{order['host']}", order["generation"])
        if own_spec is None:
            given = order["spec"]
            elastic = given["elastic"] and tuple(given["elastic"])
            own_spec = LaunchSpec(**{**given, "args": tuple(given["args"]), "elastic": elastic})
        address = order["address"] or greeting()["address"]
        env = {**order["spec"]["env"], **interface_variables(address), **own_spec.env}
        spec = dataclasses.replace(own_spec, env=env)
        spec.check_target()
        if spec.requeue:  # Slurm sends it to every node; the launcher acts on it
            signal.signal(signal.SIGUSR1, lambda signum, frame: None)
        asks = spec.requeue
        folder, keep = run_folder(spec.log_dir, order["job_id"])
        with recorder_folder() as recorders, guarded(job_id, recorders, silent=True) as guard:
            agent = ClusterAgent.for_host(
                *(self._channel, spec, job_id, folder, recorders, guard, order),
                own_signals=(signal.SIGTERM,) if asks else (),
            )
            if asks:
                signal.signal(signal.SIGTERM, self._ask_launcher)
            self._start_following(agent, job_id, spec)
            failed, stopped = True, None
            try:
                failed, stopped = _run_to_end(agent)
            finally:
                sweep(agent, job_id)
        self._over.set()
        failed = failed and not self._dismissed
        account = agent.account()
        self.left = account["left"] == END
        kept = keep or (failed and not (stopped and not account["failures"]))
        why = None if self._asked_to_stop else self.cut_off or stopped
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
        self._channel.send("ended", failed=failed, folder=str(folder) if kept else "", why=why, **account)
        return int(failed)

    def _start_following(self, agent: ClusterAgent, job_id: str, spec: LaunchSpec) -> None:
        """Start a thread that carries out the launcher's messages while ``agent`` runs. When the launcher says stop, is
        gone or is silent, the thread sends this process SIGTERM and, if that does not end the job in time, kills every
        process of the job on this host. ``job_id``, ``spec``: of the job on this host."""

        def follow() -> None:
            """Carry out messages until the job is over or is to end; the thread's function."""
            while not self._over.is_set():
                try:
                    _, message = self._inbox.get(timeout=0.25)
                except queue.Empty:
                    message = {"kind": ""}
                kind = message["kind"]
                if agent.rendezvous.take(message):
                    continue
                if kind == "asked":
                    self._channel.send("asked")
                elif kind == "finish":
                    agent.finish.set()
                elif kind == "end":
                    agent.ask_to_end()
                elif kind == "grow":
                    agent.ask_to_regroup(message["attempt"])
                elif kind in ("stop", "dismiss"):
                    self._asked_to_stop, self._dismissed = True, kind == "dismiss"
                    break
                elif kind == "eof":
                    self.cut_off = f"the way to the launcher ended: {message['why']}"
                    break
                elif (silence := self._channel.silence) > spec.silence_seconds:
                    self.cut_off = f"nothing was heard from the launcher for {silence:.1f} s"
                    break
            else:
                return
            self._stops = True
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._over.wait(spec.grace_seconds + _FORCE_SECONDS):
                # The main thread hangs in a call of torch's that signals do not interrupt.
                end_job(job_id, agent.pids, grace_seconds=0.0)
                os._exit(1)

        threading.Thread(target=follow, name="zero-launch-follow", daemon=True).start()

    def _ask_launcher(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM of a `--requeue` job: ask the launcher to have the whole job save and end. If the end has been
        ordered already, raise SignalException, with which torch's agent ends this host's ranks."""
        from torch.distributed.elastic.multiprocessing import SignalException

        if self._stops:
            raise SignalException("asked to end", signal.SIGTERM)
        self._inbox.put(("", {"kind": "asked"}))


def _end_earlier(job_id: str, generation: int) -> str:
    """End the processes that earlier agents of the job left on this host, such as stopped ranks; return the job's id on
    this host for this agent.

    ``job_id``: of the job on this host, without the number of the agent. ``generation``: the number of earlier agents.
    """
    for number in range(generation):
        end_job(f"{job_id}#{number}", (), grace_seconds=0.0)
    return f"{job_id}#{generation}"


def _run_to_end(agent: ClusterAgent) -> tuple[bool, str | None]:
    """Prepare standbys and run ``agent`` to its end; return (whether the job failed on this host, a text about the
    signal that stopped the agent or None)."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from zero_launch.job import quiet_engine

    try:
        with quiet_engine():
            agent.prepare()
            return agent.run().is_failed(), None
    except SignalException as stop:
        return True, _signal_text(stop.sigval)
    except _Stopped as stop:
        return True, str(stop)


def _stop_early(signum: int, frame: FrameType | None) -> None:
    """Raise `_Stopped` with the signal's name. It handles signals until torch's agent has installed its own
    handlers."""
    raise _Stopped(_signal_text(signum))


def _signal_text(signum: int) -> str:
    """Return a text for the launcher: this host ends because it got the signal ``signum``."""
    return f"it got {signal_name(signum)}"


def main() -> int:
    """Serve the launcher over the standard streams or, with arguments `PORT TOKEN`, over a connection back to it;
    return the exit status. The connection goes to the host that SSH_CONNECTION names."""
    inbox: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
    reader: BinaryIO
    writer: BinaryIO
    seal = None
    if len(sys.argv) > 1:
        caller = os.environ["SSH_CONNECTION"].split()[0]
        connection = connect(caller, int(sys.argv[1]), 10.0, token=sys.argv[2], about={})
        reader, writer, seal = connection.reader, connection.writer, connection.seal
    else:
        # The channel gets the pipes for itself: nobody else may write into it or read from it.
        reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
    channel = Channel("launcher", reader, writer, inbox, kinds=FROM_LAUNCHER, seal=seal).start()
    channel.send("hello", **greeting())
    return HostSide(channel, inbox).run()


if __name__ == "__main__":
    keep_from_collector()
    sys.exit(main())
