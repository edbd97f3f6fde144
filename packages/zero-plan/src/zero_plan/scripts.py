"""The user's own training script, and its dry run as one rank in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from .errors import PlanError
from .planned import Plan

_SHOWN_LINES = 20


@dataclass(frozen=True)
class Script:
    """A training script: its path ``target`` (with ``module``: the name of a module), its arguments and its engine's
    configuration.

    ``config``: replaces the configuration that the script passes to `initialize`; a value "auto" keeps the script's.
    None keeps the script's configuration.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class ScriptRank:
    """A script and the rank to run it as.

    ``ranks_per_node``: None leaves it to the configuration. ``checkpoint``: plan a save too. ``part``: the path of a
    file for what the rank saves. ``manifest``: the path of a file with the manifest of a checkpoint of ``saved_by``
    ranks; the rank then loads it into its new engine, and ends.
    """

    script: Script
    rank: int
    world_size: int
    ranks_per_node: int | None = None
    checkpoint: bool = False
    part: str | None = None
    manifest: str | None = None
    saved_by: int = 0

    def write(self, path: Path) -> None:
        """Write this object as JSON to the file ``path``, for the process that runs the script."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ScriptRank:
        """Return the object that `write` wrote to the file ``path``."""
        values = json.loads(path.read_text(encoding="utf-8"))
        script = {**values["script"], "arguments": tuple(values["script"]["arguments"])}
        return cls(**{**values, "script": Script(**script)})


class ScriptPlan(NamedTuple):
    """The plan of a script; ``lines``: the lines of code outside the model that read values, and got 1 or False."""

    plan: Plan
    lines: tuple[str, ...]


def run_rank(given: ScriptRank) -> dict[str, Any]:
    """Run the script as one rank in a new process; return its answer as plain data: "plan" and "lines" of a
    `ScriptPlan` or, with a manifest, "loaded".

    Waits until that process ends, without a time limit; its output is shown only in the error. Raises `PlanError` for
    an error that the process answers, or if it ends without an answer.
    """
    with TemporaryDirectory(prefix="zero-plan-") as folder:
        asked, answered, printed = (Path(folder) / name for name in ("asked", "answered", "printed"))
        given.write(asked)
        command = (sys.executable, "-m", "zero_plan.dry_run", str(asked), str(answered))
        with printed.open("wb") as output:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            found: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            last = "\n".join(printed.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
            raise PlanError(
                f"rank {given.rank}: the process that ran {given.script.target} ended with status {done.returncode} "
                f"and no answer. The end of its output:{os.linesep}{last}"
            ) from error
    if "error" in found:
        raise PlanError(f"rank {given.rank}: {found['error']}")
    return found
