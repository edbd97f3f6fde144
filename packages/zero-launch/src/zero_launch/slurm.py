"""The command `zero-launch slurm-script`: print the sbatch file of a job."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_launch.schedulers import sbatch_script
from zero_launch.spec import LaunchSpec


def main(argv: Sequence[str]) -> int:
    """Write the sbatch file for the job in ``argv`` to standard output, or to the file of `--output`; return 0.

    ``argv``: the words after `slurm-script`. Raises ValueError for options out of range, FileNotFoundError if the
    script does not exist, and SystemExit for words that argparse refuses, or `--help`.
    """
    parser = argparse.ArgumentParser(
        prog="zero-launch slurm-script",
        description="Print the batch file that runs a job under Slurm; submit it with sbatch.",
        epilog="example: zero-launch slurm-script --nodes 4 --nproc 8 --output job.sh train.py",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="ranks per node")
    parser.add_argument("--gpus", action="store_true", help="ask for one GPU per rank")
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit")
    parser.add_argument("--partition", metavar="NAME", help="partition of the cluster")
    parser.add_argument("--account", metavar="NAME", help="account that the job is charged to")
    parser.add_argument("--name", metavar="NAME", help="job name (default: the target's)")
    parser.add_argument(
        "--requeue",
        type=int,
        metavar="S",
        help="S seconds before the time limit save, end and go back into the queue",
    )
    parser.add_argument("--options", default="", metavar="ARGS", help="more options of zero-launch, as one argument")
    parser.add_argument("--output", metavar="FILE", help="write there instead of to standard output")
    parser.add_argument("-m", "--module", action="store_true", help="TARGET is a module, as in python -m")
    parser.add_argument("target", metavar="TARGET", help="script (or module) to run in every rank")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the target")
    options = parser.parse_args(argv)
    spec = LaunchSpec(options.target, tuple(options.args), nproc=options.nproc, module=options.module)
    spec.check_target()
    if options.nodes < 1:
        raise ValueError(f"--nodes must be at least 1, got {options.nodes}")
    text = sbatch_script(
        spec,
        name=options.name or Path(options.target).stem,
        nodes=options.nodes,
        time=options.time,
        partition=options.partition,
        account=options.account,
        gpus=options.gpus,
        options=shlex.split(options.options),
        requeue=options.requeue,
    )
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")
        os.chmod(options.output, 0o755)
    else:
        sys.stdout.write(text)
    return 0
