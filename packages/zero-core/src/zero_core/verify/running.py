"""Run the user's script under a recorder: what a rank does."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zero_core.supervision import supervised

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


def run_as_main(target: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run a script (with ``module``, a module by name) as ``__main__`` with its arguments; what it raises passes
    through."""
    before, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path
