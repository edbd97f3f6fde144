"""What to start: the frozen description of a job on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class LaunchSpec:
    """One job: `nproc` ranks that all run `target` with `args`.

    ``target``: the path of a Python script or, with ``module=True``, the name of a module (as in `python -m`).
    ``nproc``: number of ranks, at least 1.
    ``log_dir``: folder under which the run gets a folder of its own with the files of each rank; None takes a temporary
    one, which is removed when the job succeeds.
    ``env``: variables for the ranks on top of this process's environment.
    ``grace_seconds``: how long ranks may take to end by themselves once the job is to stop, before SIGKILL.
    ``direct_rank``: this rank writes to the terminal itself, without prefix and without log files, so that progress
    bars and live displays work; None sends every rank through the prefixed stream.
    ``quiet``: say nothing but what the ranks say and, when the job fails, why.

    Raises ValueError for values out of range.
    """

    target: str
    args: tuple[str, ...] = ()
    nproc: int = 1
    module: bool = False
    log_dir: str | os.PathLike[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    grace_seconds: float = 3.0
    direct_rank: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target is empty; expected the path of a script or the name of a module")
        if self.nproc < 1:
            raise ValueError(f"nproc must be at least 1, got {self.nproc}")
        if self.grace_seconds < 0:
            raise ValueError(f"grace_seconds must not be negative, got {self.grace_seconds}")
        if self.direct_rank is not None and not 0 <= self.direct_rank < self.nproc:
            raise ValueError(f"direct_rank must be a rank from 0 to {self.nproc - 1}, got {self.direct_rank}")

    def check_target(self) -> None:
        """Raise FileNotFoundError when the script is not there; a module is looked up by the ranks."""
        if not self.module and not Path(self.target).exists():
            raise FileNotFoundError(f"no script {self.target!r} in {Path.cwd()}; to run a module by name, say -m")
