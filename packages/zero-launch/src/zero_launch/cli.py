"""The command `zero-launch`, also `python -m zero_launch`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from zero_launch.job import launch
from zero_launch.report import LaunchError
from zero_launch.spec import LaunchSpec

_EPILOG = """examples:
  zero-launch --nproc 2 train.py --lr 3e-4
  zero-launch --nproc 4 --log-dir runs -m project.train
"""


def parser() -> argparse.ArgumentParser:
    """The command line: options of zero-launch, then the target, then the target's own arguments."""
    parser = argparse.ArgumentParser(
        prog="zero-launch",
        description="Start one process per rank and tell the truth about how they died.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc", default="auto", metavar="N", help="ranks to start; auto (default): one per accelerator"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="keep each rank's output in a new folder under DIR")
    parser.add_argument(
        "--grace", type=float, default=3.0, metavar="S", help="seconds to end by oneself before SIGKILL (default 3)"
    )
    parser.add_argument(
        "--direct-rank", type=int, metavar="R", help="rank R writes straight to the terminal: for live displays"
    )
    parser.add_argument("--quiet", action="store_true", help="print only what the ranks print, and failures")
    parser.add_argument("-m", "--module", action="store_true", help="TARGET is a module, as in python -m")
    parser.add_argument("target", metavar="TARGET", help="script (or, with -m, module) to run in every rank")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the target")
    return parser


def ranks_for(nproc: str) -> int:
    """The number that `--nproc` means: itself, or one per accelerator (one without any) for `auto`."""
    if nproc != "auto":
        try:
            return int(nproc)
        except ValueError:
            raise ValueError(f"--nproc: expected a number or auto, got {nproc!r}") from None
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: the first failing rank's, 2 for a wrong command line."""
    options = parser().parse_args(argv)
    try:
        spec = LaunchSpec(
            options.target,
            args=tuple(options.args),
            nproc=ranks_for(options.nproc),
            module=options.module,
            log_dir=options.log_dir,
            grace_seconds=options.grace,
            direct_rank=options.direct_rank,
            quiet=options.quiet,
        )
        launch(spec)
    except LaunchError as error:
        print(f"zero-launch: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except (FileNotFoundError, ValueError) as error:
        print(f"zero-launch: {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        # Whoever read our output is gone, and the job was ended for it. What is buffered has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
