"""Run a job on this machine: start it, wait for it, and end everything that it started."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from zero_launch import requeue
from zero_launch.cores import bindings, threads_per_rank, usable_cores
from zero_launch.guard import Guard
from zero_launch.processes import CORES_VARIABLE, JOB_VARIABLE, LAUNCHER_PID_VARIABLE, REQUEUE_VARIABLE, end_job
from zero_launch.record import record_interruption
from zero_launch.report import LaunchError, signal_name
from zero_launch.requeue import LeftEarly
from zero_launch.sockets import LOOPBACK, interface_variables
from zero_launch.spec import LaunchSpec

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from zero_launch.agent import Agent
    from zero_launch.rank_files import RankFiles
    from zero_launch.standby_pool import StandbyPool

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_MONITOR_SECONDS = 0.1
_LEAST_FREE_BYTES = 1 << 16
"""With less a disk counts as full."""


def launch(spec: LaunchSpec) -> None:
    """Run the job that ``spec`` describes and return when every rank has ended with status 0.

    Raises FileNotFoundError when the script is not there, and LaunchError when a rank fails: then every process of the
    job has been ended, and the error names the first cause. Raises LeftEarly when the ranks of a `--requeue` job have
    saved and left, and ValueError if ranks cannot be bound to cores. A signal (SIGINT, SIGTERM, SIGHUP, SIGQUIT) to
    this process is passed to the ranks, and takes effect here when they are gone. Call it from the main thread:
    elsewhere signals do not reach the ranks.
    """
    spec.check_target()
    run_job(spec, kind=spec.kind)


def _about_logs(folder: Path) -> list[str]:
    """Return notes for the error of a failed job: where its logs are and, if that disk is full, that it is. ``folder``:
    of the logs."""
    notes = [f"logs of every rank: {folder}"]
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE_BYTES:
        notes.append(
            f"their disk has {free} bytes free, and a rank whose output cannot be written fails: make room there, or "
            "name a folder on another disk with --log-dir"
        )
    return notes


def run_job(spec: LaunchSpec, *, kind: Literal["script", "module", "program", "call"]) -> None:
    """Run a job as `launch` does, without checking the target; ``kind`` says how a rank runs it (see rank.py).

    Unless the job is quiet, prints what starts. Raises, besides LaunchError, LeftEarly when the ranks of a `--requeue`
    job have saved and left, and ValueError if ranks cannot be bound to cores (see `bindings`).
    """
    job_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    cores = bindings(spec.nproc, spec.core_list) if spec.bind_cores else []
    folder, keep = run_folder(spec.log_dir, job_id)
    env = {**interface_variables(LOOPBACK), **job_environment(spec, cores, job_id)}
    if not spec.quiet:
        _say(_greeting(spec, env, folder if keep else None))
    with recorder_folder() as recorders, guarded(job_id, recorders) as guard:
        agent, interrupted, failed = _run_agent(spec, kind, job_id, folder, env, cores, recorders, guard)
    if interrupted is not None and not (agent.asked_to_end and interrupted == signal.SIGTERM):
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        why = f"interrupted by {signal_name(interrupted)}"
        _say(f"{why}; every process of the job has ended")
        if (report := record_interruption(spec.env, why, agent.flight)) is not None:
            _say(f"report: {report}")
        signal.raise_signal(interrupted)
        raise LaunchError([], spec.nproc, [why])
    if interrupted is not None:
        raise LaunchError([], spec.nproc, ["SIGTERM again: ended at once"], flight=agent.flight, asked=True)
    if failed:
        raise agent.error(_about_logs(folder))
    for note in agent.notes:
        _say(note)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    if agent.left_for is not None:
        raise LeftEarly


def _run_agent(
    spec: LaunchSpec,
    kind: str,
    job_id: str,
    folder: Path,
    env: dict[str, str],
    cores: list[tuple[int, ...]],
    recorders: Path,
    guard: Guard,
) -> tuple[Agent, int | None, bool]:
    """Run the job to its end; return the agent, the signal that interrupted it (or None), and whether it failed.

    ``folder``: for the ranks' files. ``env``: variables of every rank. ``cores``: those of each rank, empty if none is
    bound. ``recorders``: the folder for flight recorders. ``guard``: gets the ranks' pids. ``kind``: how a rank runs
    the target (see rank.py). With an interruption the agent has ended the ranks, and failed is False.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    from zero_launch.agent import Agent
    from zero_launch.devices import counter
    from zero_launch.local_rendezvous import LocalRendezvous
    from zero_launch.rank_files import RankFiles

    interrupted: int | None = None
    failed = False
    with _own_signal_handlers():
        files = RankFiles(
            folder,
            spec.direct_rank,
            env,
            own_env=core_variables(cores),
            recorders=recorders,
            takes_orders=spec.requeue,
        )
        worker_spec = worker_group_spec(spec, kind, LocalRendezvous(job_id), LOOPBACK)
        files.standby_pool = standby_pool_of(spec, worker_spec, files, recorders, _say)
        agent = Agent(
            worker_spec,
            files,
            job_id,
            spec.grace_seconds,
            stopped_seconds=spec.silence_seconds,
            quiet=spec.quiet,
            started=lambda pids: guard.watch(list(pids.values())),
            own_signals=requeue.SIGNALS if spec.requeue else (),
            ranks_now=None if spec.elastic is None else counter(spec.elastic, spec.nproc),
        )
        if spec.requeue:
            handle_requeue_signals(agent)
        try:
            with quiet_engine():
                failed = agent.run().is_failed()
        except SignalException as stop:
            interrupted = stop.sigval
        finally:
            sweep(agent, job_id)
            if agent.asked_to_end:
                requeue.hold()
    return agent, interrupted, failed


def handle_requeue_signals(agent: Agent) -> None:
    """Install handlers with which the first SIGUSR1 or SIGTERM has the ranks save and leave, and a later SIGTERM ends
    them at once (see requeue.py); from here on these signals are no longer held back. Call it in the main thread."""
    from torch.distributed.elastic.multiprocessing import SignalException

    requests = requeue.Requests()

    def handle(signum: int, frame: FrameType | None) -> None:
        """Ask ``agent`` to end, or raise SignalException to end at once, as `Requests.hear` says."""
        meaning = requests.hear(signum)
        if meaning == "now":
            raise SignalException("asked to end again", signal.SIGTERM)
        if meaning == "ask":
            agent.ask_to_end(f"{signal_name(signum)}: the ranks save a checkpoint after this step, and end")

    for sig in requeue.SIGNALS:
        signal.signal(sig, handle)
    requeue.release()


def worker_group_spec(
    spec: LaunchSpec, kind: str, rendezvous: RendezvousHandler, local_address: str | None
) -> WorkerSpec:
    """Return torch's description of the ranks that the elastic agent starts on this host.

    ``spec``: the job, with this host's number of ranks. ``kind``: how a rank runs the target (see rank.py).
    ``rendezvous``: where the agent gets its rounds. ``local_address``: by which other hosts reach this one; None for
    torch's default.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    return WorkerSpec(
        role="rank",
        local_world_size=spec.nproc,
        entrypoint=sys.executable,
        args=("-m", "zero_launch.rank", kind, spec.target, *spec.args),
        rdzv_handler=rendezvous,
        max_restarts=spec.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
        local_addr=local_address,
    )


def standby_pool_of(
    spec: LaunchSpec, worker_spec: WorkerSpec, files: RankFiles, recorders: Path, say: Callable[[str], object]
) -> StandbyPool | None:
    """Return the pool of standbys (processes that have imported what ranks import, and fork them at a restart) for a
    job's ranks on this host, still empty; None unless the job is elastic, wants standbys, and runs Python.

    ``worker_spec``: names the command of a rank. ``files``: give the variables of a rank. ``recorders``: the folder in
    which ranks record their imports. ``say``: called with a text when standbys are given up.
    """
    from zero_launch.standby_pool import StandbyPool

    if spec.elastic is None or spec.program or not spec.standby:
        return None
    return StandbyPool([str(worker_spec.entrypoint), *worker_spec.args], files.own_variables, recorders, say)


def run_folder(log_dir: str | os.PathLike[str] | None, job_id: str) -> tuple[Path, bool]:
    """Make and return the folder for this run's files on this host, and whether it is kept when the job succeeds.

    A folder under ``log_dir`` is kept; without one a temporary folder is not.
    """
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="zero-launch-")), False
    folder = Path(log_dir).absolute() / job_id
    folder.mkdir(parents=True, exist_ok=True)  # hosts that share the file system share it
    return folder, True


@contextlib.contextmanager
def recorder_folder() -> Iterator[Path]:
    """Context manager: make a folder for the ranks' flight recorders, in shared memory if possible, yield its path, and
    remove it at the end."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="zero-launch-rings-", dir=shared, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def guarded(job_id: str, recorders: Path, *, silent: bool = False) -> Iterator[Guard]:
    """Context manager: while it is open, a guard process ends the job's processes and removes the folder ``recorders``
    if this process is killed. Yields the guard. ``silent``: the guard does not keep this process's standard error open.
    """
    guard = Guard(job_id, str(recorders), silent=silent)
    try:
        yield guard
    finally:
        guard.dismiss()


def job_environment(spec: LaunchSpec, cores: list[tuple[int, ...]], job_id: str) -> dict[str, str]:
    """Return the environment variables that every rank of this host gets besides this process's own.

    They name the job and set, where the environment does not, OMP_NUM_THREADS (a rank's share of the cores) and
    THP_MEM_ALLOC_ENABLE (torch then asks for huge pages for tensors of 2 MiB and more on the CPU). ``spec.env``
    overrides all others. ``cores``: those of each rank, empty if none is bound. ``job_id``: the job's id on this host.
    """
    env = {LAUNCHER_PID_VARIABLE: str(os.getpid()), JOB_VARIABLE: job_id}
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(len(cores[0]) if cores else threads_per_rank(spec.nproc))
    env["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    if spec.requeue:
        env[REQUEUE_VARIABLE] = "1"
    return {**env, **spec.env}


def core_variables(cores: list[tuple[int, ...]]) -> list[dict[str, str]]:
    """Return, by local rank, the variables that tell each rank its cores (see rank.py); empty without ``cores``."""
    return [{CORES_VARIABLE: ",".join(map(str, own))} for own in cores]


def _greeting(spec: LaunchSpec, env: dict[str, str], folder: Path | None) -> str:
    """Return the line that says what starts: the number of ranks, their threads and, unless ``folder`` is None, the
    logs."""
    threads = env.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
    source = f"{usable_cores()} cores" if "OMP_NUM_THREADS" in env and "OMP_NUM_THREADS" not in spec.env else "as set"
    source += ", bound" if spec.bind_cores else ""
    logs = f", logs in {folder}" if folder else ""
    return f"{spec.nproc} {'rank' if spec.nproc == 1 else 'ranks'}, OMP_NUM_THREADS={threads} ({source}){logs}"


def _say(text: str) -> None:
    """Print a line of the launcher's on standard error."""
    print(f"zero-launch: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Context manager: at the end restore the signal handlers of its start, as torch's agent installs its own and
    leaves them. Outside of the main thread it does nothing."""
    main_thread = threading.current_thread() is threading.main_thread()
    saved = {sig: signal.getsignal(sig) for sig in _SIGNALS} if main_thread else {}
    try:
        yield
    finally:
        for sig, handler in saved.items():
            signal.signal(sig, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def quiet_engine() -> Iterator[None]:
    """Context manager: silence the log of torch's elastic agent, as our report says the same, in order."""
    loggers = [
        logger
        for name, logger in logging.Logger.manager.loggerDict.items()
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger)
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def sweep(agent: Agent, job_id: str) -> None:
    """End what still runs of the job on this host after torch's agent has ended: its standbys, then every other process
    by SIGKILL, each of which is added to the agent's ``notes``. In the main thread, also ignore signals from here
    on."""
    main_thread = threading.current_thread() is threading.main_thread()
    for sig in _SIGNALS if main_thread else ():
        signal.signal(sig, signal.SIG_IGN)
    agent.dismiss_standbys()
    agent.notes += [f"left behind: {text}" for _, text in end_job(job_id, (), grace_seconds=0.0)]
