"""Frozen descriptions of a job to start, on this machine and on several hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zero_launch.hostfile import Hostfile
from zero_launch.transport import Transport

SILENCE_SECONDS = 4.0
MIN_SILENCE_SECONDS = 2.0


@dataclass(frozen=True)
class LaunchSpec:
    """One job: `nproc` ranks that all run `target` with `args`.

    ``target``: the path of a Python script or, with ``module=True``, the name of a module (as in `python -m`).
    ``nproc``: number of ranks, at least 1.
    ``log_dir``: folder under which the run gets a folder of its own with the files of each rank; None takes a temporary
    one, which is removed when the job succeeds.
    ``env``: variables for the ranks, added to this process's environment.
    ``grace_seconds``: how long ranks may take to end by themselves once the job is to stop, before SIGKILL.
    ``direct_rank``: this rank writes to the terminal itself, without prefix and without log files, so that progress
    bars and live displays work; None: every rank's lines are prefixed and logged.
    ``quiet``: print only the ranks' output and, if the job fails, its error.
    ``program``: ``target`` is a program to run as it is, not a Python script.
    ``max_restarts``: how often all ranks are started again after a failure.
    ``silence_seconds``: a host that sends nothing for so long counts as lost; a rank that is stopped (SIGSTOP) for so
    long is reported.
    ``elastic``: the least and the most ranks with which the job continues when hosts or devices come and go.
    ``requeue``: at the first SIGUSR1 or SIGTERM the ranks save and end, and `launch` raises `LeftEarly`.
    ``standby``: an elastic job keeps a process that has imported torch, from which restarted ranks are forked.
    ``bind_cores``: bind each rank to cores of its own, near each other; ``core_list`` restricts them, as in `0,2-5`.

    Raises ValueError for values out of range.
    """

    target: str
    args: tuple[str, ...] = ()
    nproc: int = 1
    module: bool = False
    log_dir: str | os.PathLike[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace_seconds: float = 2.0
    direct_rank: int | None = None
    quiet: bool = False
    program: bool = False
    max_restarts: int = 0
    bind_cores: bool = False
    core_list: str = ""
    silence_seconds: float = SILENCE_SECONDS
    elastic: tuple[int, int] | None = None
    requeue: bool = False
    standby: bool = True

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target is empty; expected the path of a script or the name of a module")
        if self.nproc < 1:
            raise ValueError(f"nproc must be at least 1, got {self.nproc}")
        if self.grace_seconds < 0:
            raise ValueError(f"grace_seconds must not be negative, got {self.grace_seconds}")
        if not self.silence_seconds >= MIN_SILENCE_SECONDS:
            raise ValueError(
                f"silence_seconds must be at least {MIN_SILENCE_SECONDS:.0f}: hosts are heard twice a second, got "
                f"{self.silence_seconds}"
            )
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")
        if self.elastic is not None and not 1 <= self.elastic[0] <= self.elastic[1]:
            raise ValueError(f"elastic: expected 1 <= MIN <= MAX, got {self.elastic[0]}:{self.elastic[1]}")
        if self.module and self.program:
            raise ValueError(f"{self.target!r} is either a module or a program: give one of --module and --no_python")
        if self.direct_rank is not None and not 0 <= self.direct_rank < self.nproc:
            raise ValueError(f"direct_rank must be a rank from 0 to {self.nproc - 1}, got {self.direct_rank}")

    @property
    def kind(self) -> Literal["script", "module", "program"]:
        """Return how a rank runs the target; a word of the command line of rank.py."""
        return "module" if self.module else "program" if self.program else "script"

    def check_target(self) -> None:
        """Raise FileNotFoundError if the script or program does not exist on this host. Do nothing for a module, which
        only the ranks look up."""
        if self.program:
            if shutil.which(self.target) is None:
                raise FileNotFoundError(f"no program {self.target!r} in {Path.cwd()} or in PATH")
        elif not self.module and not Path(self.target).exists():
            raise FileNotFoundError(f"no script {self.target!r} in {Path.cwd()}; to run a module by name, say -m")


@dataclass(frozen=True)
class ClusterSpec:
    """A job on several hosts.

    ``job``: what each rank runs; its number of ranks comes from the hosts' slots. ``hosts``: the hosts in rank order,
    with their slots. ``transport``: starts this program on them. ``min_hosts``: the fewest hosts with which the job
    begins, or continues after a restart; None: all of them. ``variables``: environment variables that are sent to the
    hosts. ``master_address``, ``master_port``: where the ranks' store listens on the first host; by default the address
    at which this process reached it, and a free port. ``bind_devices``: set CUDA_VISIBLE_DEVICES to the host's slots.

    ``nodes``: with `--no_ssh`, where every host has a launcher of its own that connects to ``master_port`` of this one:
    the number of hosts, this one included; ``hosts`` then holds this host only. ``token``: the secret that these hosts
    share (see handshake.py). ``bind_address``: address to listen at if the other hosts reach this one, or the ranks'
    store, by an address that is not its own; by default that address itself.

    Raises ValueError if ``nodes`` is more than 1 without ``token``.
    """

    job: LaunchSpec
    hosts: Hostfile
    transport: Transport = field(default_factory=Transport)
    min_hosts: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    master_address: str | None = None
    master_port: int = 0
    bind_devices: bool = False
    nodes: int = 1
    token: str | None = None
    bind_address: str | None = None

    def __post_init__(self) -> None:
        if self.nodes > 1 and not self.token:
            raise ValueError("token: nodes that come by themselves need one, the same on all of them")
