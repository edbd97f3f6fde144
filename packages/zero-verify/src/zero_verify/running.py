"""Run the user's script under a recorder, in one rank."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zero_core.supervision import supervised
from zero_launch.scripts import run_as_main

from .recorder import AllStepsTaken, Recorder
from .variants import Variant


@dataclass(frozen=True)
class ScriptRun:
    """One recorded run: which script, under which configuration, and where the recording goes.

    ``folder``: of the recording. ``variant``: a `Variant`'s value. ``target``: the path of a script or, with
    ``module``, a module's name; ``arguments``: its command line. ``config``: the path of a configuration file; None
    uses what the script gives to `initialize`. ``steps``: to record. ``seed``: of Python's and torch's generators at
    the start.
    """

    folder: str
    variant: str
    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    config: str | None = None
    steps: int = 3
    seed: int = 0

    def write(self, path: Path) -> None:
        """Write the run's settings to the file ``path`` as JSON, from which the ranks read them."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ScriptRun:
        """Return the run whose settings `write` stored in the file ``path``."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "arguments": tuple(values["arguments"])})


def run_script(plan: ScriptRun) -> None:
    """Run the script of ``plan`` as ``__main__`` in this process and record it; return after the requested steps, or
    when the script ends earlier. On return the engines are destroyed, collectively.

    Every rank calls it; the environment says which rank this is. The script's exceptions propagate, and leave the
    engines as they are."""
    random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    recorder = Recorder(Path(plan.folder), Variant(plan.variant), plan.steps, plan.config)
    try:
        with supervised(recorder):
            run_as_main(plan.target, plan.arguments, module=plan.module)
    except AllStepsTaken:
        recorder.close()
    else:
        recorder.close()
