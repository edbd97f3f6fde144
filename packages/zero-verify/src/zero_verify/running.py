"""Run the user's script under a recorder: what a rank does."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zero_core.supervision import run_as_main, supervised

from .recorder import Enough, Recorder
from .variants import Variant


@dataclass(frozen=True)
class ScriptRun:
    """One recorded run: which script, under which configuration, and where the recording goes.

    ``target``: the path of a script, or with ``module`` a module's name. ``config``: the path of the user's file; None
    takes what the script gives to `initialize`. ``seed``: of Python's and torch's generators when the script starts.
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
        """Store the plan for the ranks."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ScriptRun:
        """The plan that `write` stored."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "arguments": tuple(values["arguments"])})


def run_script(plan: ScriptRun) -> None:
    """Run the plan's script as ``__main__`` in this process and record it; returns after the steps asked for.

    The environment says which rank this is. Everything the script raises passes through.
    """
    random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    recorder = Recorder(Path(plan.folder), Variant(plan.variant), plan.steps, plan.config)
    try:
        with supervised(recorder):
            run_as_main(plan.target, plan.arguments, module=plan.module)
    except Enough:
        recorder.close()
    else:
        recorder.close()
