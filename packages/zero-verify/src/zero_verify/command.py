"""`zero-core verify`: run the script at stage 0 and under the user's configuration, and compare."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comparison import Difference, Judge
    from .running import ScriptRun
    from .variants import Variant

_ABOUT = """\
Run a training script for a few steps at stage 0 and under your configuration, and compare what they compute, bit by
bit: the weights that forward reads on every rank, losses, gradients, the gradient norm, weights. Then, if the
configuration computes in 16 bits, compare with float32 within a bound. The first tensor that differs is named. Exit
status: 0 all equal, 1 something differs, 2 the script cannot be compared. The script runs as it is, and its files
are written each time. Arguments after -- are the script's.
"""
_CANNOT = 2
_BOUND_IN_EPSILONS = 16


def add_verify_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command `verify` to ``subparsers`` and return its parser. The namespace that parsing returns has an
    attribute `run`: `run(namespace)` runs the command and returns the exit status.

    The caller sets ``script_arguments`` of the namespace to the words of the command line after ``--``."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a script's training at stage 0 and under a configuration",
        description=_ABOUT,
        epilog="example: zero-core verify train.py --config ds.json --steps 3 --nproc 2",
        usage="zero-core verify TARGET [options] [-- ARGUMENTS OF TARGET]",
    )
    parser.add_argument("target", help="a training script that calls zero_core.initialize (with -m, a module)")
    parser.add_argument("-m", "--module", action="store_true", help="TARGET is a module, as in python -m")
    parser.add_argument("--config", metavar="FILE", help="use this instead of what the script gives to initialize")
    parser.add_argument("--steps", type=_count, default=3, metavar="K", help="optimizer steps to compare (default: 3)")
    parser.add_argument("--nproc", type=_count, metavar="N", help="ranks (default: one per accelerator, 2 without any)")
    parser.add_argument("--seed", type=int, default=0, help="of every rank's generators at the start (default: 0)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="relative deviation from stage 0 allowed per step, for what is not bitwise equal by design, such as other "
        "optimizer kernels on another device (default: none, bit by bit)",
    )
    parser.add_argument(
        "--bound",
        type=float,
        metavar="B",
        help="relative deviation from float32 allowed per step (default: 16 epsilon)",
    )
    parser.add_argument("--no-float32", action="store_true", help="leave the comparison with float32 out")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the recordings in this new folder")
    parser.set_defaults(run=_verify, script_arguments=())
    return parser


def _verify(options: argparse.Namespace) -> int:
    """Run the script in all variants and compare them; return the exit status: 0 all equal, 1 something differs, 2 the
    script cannot be compared.

    Recordings go to the folder ``--keep``, or to a temporary one. Raises `UsageError` for a missing script, an
    unreadable configuration, and a folder ``--keep`` that exists."""
    from zero_core.errors import UsageError

    from .running import ScriptRun
    from .variants import Variant

    if not options.module and not Path(options.target).is_file():
        raise UsageError(f"there is no script {options.target!r}; to run a module by name, say -m")
    if options.config is not None:
        _check_config(options.config)
    with ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-verify-")))
        if options.keep:
            _make_new(folder)
        plan = ScriptRun(
            folder=str(folder),
            variant=Variant.GIVEN.value,
            target=options.target,
            arguments=tuple(options.script_arguments),
            module=options.module,
            config=None if options.config is None else str(Path(options.config).absolute()),
            steps=options.steps,
            seed=options.seed,
        )
        return _Runs(plan, options).compare()


class NothingToCompare(RuntimeError):
    """The script made no engine that took a step."""


class _Runs:
    """Runs one script in several variants (see `Variant`), each when it is needed, and compares them. ``plan``: the
    settings that all runs share; ``options``: the parsed command line.

    Each run is recorded to a folder of its own, below that of ``plan``. Exit statuses: 0 all equal, 1 something
    differs, 2 the script cannot be compared."""

    def __init__(self, plan: ScriptRun, options: argparse.Namespace) -> None:
        self._plan = plan
        self._nproc: int = options.nproc or _default_nproc()
        self._tolerance: float | None = options.tolerance
        self._bound: float | None = options.bound
        self._skip_float32: bool = options.no_float32
        self._name = Path(plan.config).name if plan.config else "the script's configuration"

    def compare(self) -> int:
        """Run the script at stage 0 and under the configuration, print how they compare, and return the exit status. If
        they are equal, compare with float32 too. A failed run and a script without steps are printed as errors."""
        from zero_core.report import counted
        from zero_launch import LaunchError

        from .comparison import Bitwise, Within
        from .variants import Variant

        exact = self._tolerance is None
        judge: Judge = Within(self._tolerance) if self._tolerance is not None else Bitwise()
        try:
            self._record(Variant.REFERENCE, "reference", "stage 0")
            self._record(Variant.GIVEN, "given", self._name)
            found = self._difference("reference", "given", judge)
            if found is not None:
                return self._explain(found, judge)
            how = "bitwise equal to stage 0" if exact else f"within {self._tolerance:.3g} per step of stage 0"
            _say(f"{self._name} is {how} on {counted(self._nproc, 'rank')} in {self._step_counts()}")
            return self._compare_with_float32()
        except (LaunchError, NothingToCompare) as error:
            print(f"zero-core verify: {error}", file=sys.stderr)
            return _CANNOT

    def _explain(self, found: Difference, judge: Judge) -> int:
        """Run the script at stage 0 again. If it differs from the first run at stage 0, print that it does not repeat
        itself and return 2. Otherwise print ``found``, the difference between the configuration and stage 0, and return
        1.

        ``judge`` says whether the two runs at stage 0 differ."""
        from .variants import Variant

        _say(f"{self._name} differs from stage 0; once more at stage 0, to see whether the script repeats itself")
        self._record(Variant.REFERENCE, "again", "stage 0, again")
        own = self._difference("reference", "again", judge)
        if own is not None:
            print(
                "zero-core verify: the script cannot be compared, for it does not repeat itself: two runs at stage 0 "
                f"differ.\n{own}\nSeed it, and switch off what is not deterministic.",
                file=sys.stderr,
            )
            return _CANNOT
        _say(f'{self._name} differs from stage 0 ("expected")\n{found}')
        return 1

    def _compare_with_float32(self) -> int:
        """If the configuration computes in 16 bits, run the script in float32 too, print how the two compare, and
        return the exit status. Otherwise, and with ``--no-float32``, return 0."""
        from .comparison import Within
        from .recording import Recording
        from .variants import Variant, rounding

        recording = Recording(Path(self._plan.folder) / "given")
        epsilon = max(rounding(next(recording.steps(number)).config) for number in range(len(recording.engines)))
        if not epsilon or self._skip_float32:
            return 0
        bound = self._bound if self._bound is not None else _BOUND_IN_EPSILONS * epsilon
        self._record(Variant.FLOAT32, "float32", "stage 0 in float32")
        found = self._difference("float32", "given", Within(bound))
        if found is not None:
            _say(f'{self._name} is too far from float32 ("expected")\n{found}')
            return 1
        _say(f"within {bound:.3g} per step of float32")
        return 0

    def _record(self, variant: Variant, name: str, title: str) -> None:
        """Run the script on all ranks as ``variant`` and record it to the folder called ``name``. ``title``: of the
        run, for the line that is printed. Raises `zero_launch.LaunchError` if the run fails."""
        from zero_launch import LaunchSpec, launch

        folder = Path(self._plan.folder) / name
        stored = Path(self._plan.folder) / f"{name}.json"
        replace(self._plan, folder=str(folder), variant=variant.value).write(stored)
        _say(f"running {self._plan.target}: {title}")
        environment = {"PYTHONHASHSEED": str(abs(self._plan.seed) % 2**32), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        launch(
            LaunchSpec("zero_verify", args=(str(stored),), nproc=self._nproc, module=True, env=environment, quiet=True)
        )

    def _difference(self, expected: str, got: str, judge: Judge) -> Difference | None:
        """Return the first difference that ``judge`` does not accept between the recordings in the folders called
        ``expected`` and ``got``; None if there is none. Raises `NothingToCompare` if no engine of ``expected`` took a
        step."""
        from .comparison import compare
        from .recording import Recording

        folder = Path(self._plan.folder)
        ours = Recording(folder / expected)
        if not ours.engines:
            raise NothingToCompare(
                f"{self._plan.target} took no optimizer step: expected a script that calls zero_core.initialize with "
                "an optimizer, engine.backward and engine.step"
            )
        return compare(ours, Recording(folder / got), judge)

    def _step_counts(self) -> str:
        """Return text that says how many steps each engine took under the configuration, and how many were asked for if
        those are more."""
        from .recording import Recording

        recording = Recording(Path(self._plan.folder) / "given")
        counts = [recording.count(number) for number in range(len(recording.engines))]
        asked = "" if min(counts) >= self._plan.steps else f" ({self._plan.steps} were asked for)"
        return f"{', '.join(map(str, counts))} {'step' if counts == [1] else 'steps'}{asked}"


def _check_config(path: str) -> None:
    """Raise `UsageError` if the file at ``path`` cannot be read as a configuration. Its values are not checked: the
    ranks do that."""
    from zero_core.errors import UsageError
    from zero_settings import ConfigError, read

    try:
        read(path)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _make_new(folder: Path) -> None:
    """Create ``folder``, the value of ``--keep``, and its parents. Raises `UsageError` if it exists."""
    from zero_core.errors import UsageError

    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"--keep {folder} exists already; name a new folder") from None


def _default_nproc() -> int:
    """Return the number of ranks to start by default: one per accelerator of this machine, 2 if it has none."""
    import torch

    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 2


def _count(text: str) -> int:
    """Return the text of a command-line argument as an integer >= 1. Raises `argparse.ArgumentTypeError` for other
    text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def _say(text: str) -> None:
    """Print ``text`` as one line to standard output, after the command's name."""
    print(f"zero-core verify: {text}", flush=True)
