"""`plan_script`: a dry run of the user's own script, once per rank, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from .errors import PlanError, at_least_one
from .planned import Plan, RankPlan
from .ranks import chosen_ranks

_SHOWN_LINES = 20


@dataclass(frozen=True)
class Script:
    """A training script: its path (with ``module``: the name of a module), its arguments and its engine's
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

    ``ranks_per_node``: None leaves it to the configuration. ``checkpoint``: plan a save too.
    """

    script: Script
    rank: int
    world_size: int
    ranks_per_node: int | None = None
    checkpoint: bool = False

    def write(self, path: Path) -> None:
        """Write it to the file ``path``, for the process that runs the script."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ScriptRank:
        """Return the one that `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        script = {**values["script"], "arguments": tuple(values["script"]["arguments"])}
        return cls(**{**values, "script": Script(**script)})


class ScriptPlan(NamedTuple):
    """The plan of a script; ``lines``: the lines of code outside the model that read values, and got 1 or False."""

    plan: Plan
    lines: tuple[str, ...]


def plan_script(
    script: Script,
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    ranks: Iterable[int] | None = None,
    checkpoint: bool = False,
) -> ScriptPlan:
    """Return what a training script needs, by running it dry until its engine has taken three steps.

    ``ranks_per_node``: by default that of the configuration, else all ranks. ``ranks``, ``checkpoint``: see
    `zero_plan.plan`. Files that the script writes before its third step ends are written; its output is not shown.
    Raises `PlanError` for a script that cannot be planned, naming the line in the user's file.
    """
    if ranks_per_node is not None:
        at_least_one(ranks_per_node=ranks_per_node)
    if not script.module and not Path(script.target).is_file():
        raise PlanError(f"there is no script {script.target!r}; to run a module by name, say -m")
    chosen = chosen_ranks(world_size, ranks)
    found = [_plan_rank(ScriptRank(script, rank, world_size, ranks_per_node, checkpoint)) for rank in chosen]
    lines = dict.fromkeys(line for answer in found for line in answer["lines"])
    return ScriptPlan(Plan(world_size, tuple(RankPlan.from_dict(answer["plan"]) for answer in found)), tuple(lines))


def _plan_rank(given: ScriptRank) -> dict[str, Any]:
    """Run the script as one rank in a new process; return the answer of `zero_plan.dry_run.__main__`: plan and lines.

    Raises `PlanError` for an error that the process answers, or if it ends without an answer.
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
