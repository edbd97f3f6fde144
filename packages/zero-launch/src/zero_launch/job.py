"""Start a job, wait for it, and leave nothing behind."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zero_launch.cores import threads_per_rank, usable_cores
from zero_launch.processes import LAUNCHER_PID_VARIABLE, end_job
from zero_launch.report import LaunchError, signal_name
from zero_launch.spec import LaunchSpec

if TYPE_CHECKING:
    from zero_launch.agent import Agent

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MONITOR_SECONDS = 0.1


def launch(spec: LaunchSpec) -> None:
    """Run the job that ``spec`` describes and return when every rank has ended with status 0.

    Raises FileNotFoundError when the script is not there, and LaunchError when a rank fails: then every process of
    the job has been ended, and the error names the first cause. A signal (SIGINT, SIGTERM, SIGHUP, SIGQUIT) to this
    process is passed to the ranks, and takes effect here when they are gone. Call it from the main thread: elsewhere
    signals do not reach the ranks.
    """
    run_job(spec, kind="module" if spec.module else "script")


def run_job(spec: LaunchSpec, *, kind: Literal["script", "module", "call"]) -> None:
    """Like `launch`; ``kind`` says how a rank runs the target (see rank.py)."""
    spec.check_target()
    job_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder, keep = _run_folder(spec, job_id)
    env = _environment(spec)
    if not spec.quiet:
        _say(_greeting(spec, env, folder if keep else None))
    from torch.distributed.elastic.multiprocessing import SignalException

    with _own_signal_handlers():
        agent = make_agent(spec, kind, job_id, folder, env)
        interrupted: int | None = None
        failed = False
        try:
            with _quiet_engine():
                failed = agent.run().is_failed()
        except SignalException as stop:
            interrupted = stop.sigval
        finally:
            _sweep(agent, job_id)
    if interrupted is not None:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        _say(f"interrupted by {signal_name(interrupted)}; every process of the job has ended")
        signal.raise_signal(interrupted)
        raise LaunchError([], spec.nproc, [f"interrupted by {signal_name(interrupted)}"])
    if failed:
        raise agent.error([f"logs of every rank: {folder}"])
    for note in agent.notes:
        _say(note)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


def make_agent(spec: LaunchSpec, kind: str, job_id: str, folder: Path, env: dict[str, str]) -> Agent:
    """An elastic agent for ranks on this machine: rendezvous over c10d on a free port of the loopback interface."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from zero_launch.agent import Agent, RankFiles

    rendezvous = RendezvousParameters(
        backend="c10d", endpoint="localhost:0", run_id=job_id, min_nodes=1, max_nodes=1, local_addr="localhost"
    )
    worker_spec = WorkerSpec(
        role="rank",
        local_world_size=spec.nproc,
        entrypoint=sys.executable,
        args=("-m", "zero_launch.rank", kind, spec.target, *spec.args),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        local_addr="localhost",
    )
    return Agent(worker_spec, RankFiles(folder, spec.direct_rank, env), job_id, spec.grace_seconds)


def _run_folder(spec: LaunchSpec, job_id: str) -> tuple[Path, bool]:
    """The folder for the files of this run, and whether it stays when the job succeeds."""
    if spec.log_dir is None:
        return Path(tempfile.mkdtemp(prefix="zero-launch-")), False
    folder = Path(spec.log_dir).absolute() / job_id
    folder.mkdir(parents=True)
    return folder, True


def _environment(spec: LaunchSpec) -> dict[str, str]:
    env = {LAUNCHER_PID_VARIABLE: str(os.getpid())}
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(threads_per_rank(spec.nproc))
    return {**env, **spec.env}


def _greeting(spec: LaunchSpec, env: dict[str, str], folder: Path | None) -> str:
    threads = env.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
    source = f"{usable_cores()} cores" if "OMP_NUM_THREADS" in env and "OMP_NUM_THREADS" not in spec.env else "as set"
    logs = f", logs in {folder}" if folder else ""
    return f"{spec.nproc} {'rank' if spec.nproc == 1 else 'ranks'}, OMP_NUM_THREADS={threads} ({source}){logs}"


def _say(text: str) -> None:
    print(f"zero-launch: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put the caller's signal handlers back: the engine installs its own and leaves them there."""
    main_thread = threading.current_thread() is threading.main_thread()
    saved = {sig: signal.getsignal(sig) for sig in _SIGNALS} if main_thread else {}
    try:
        yield
    finally:
        for sig, handler in saved.items():
            signal.signal(sig, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def _quiet_engine() -> Iterator[None]:
    """Hold back the engine's own log lines about ends and signals: the report says the same, in order."""
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


def _sweep(agent: Agent, job_id: str) -> None:
    """After the engine has ended, however it did: nothing of the job may run. Signals wait until this is done."""
    main_thread = threading.current_thread() is threading.main_thread()
    for sig in _SIGNALS if main_thread else ():
        signal.signal(sig, signal.SIG_IGN)
    agent.notes += [f"left behind: {text}" for _, text in end_job(job_id, (), grace_seconds=0.0)]
