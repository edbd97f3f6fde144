"""`zero-plan run`: a dry run of the user's own script."""

from __future__ import annotations

import argparse
import sys

from ..dry import plan_script
from ..scripts import Script
from .configuration import read_configuration
from .plan_printing import add_plan_arguments, machine_from_options, print_plan
from .printing import progress

_RUN = """\
Run your training script dry, as chosen ranks of any world size, until its engine has taken three steps, and say what
each rank holds, its peaks of memory in a step, and what it sends. No memory is allocated for tensors, and no other rank
is needed. Files that the script itself writes are written. Where it reads a number outside its model, such as the loss,
it gets 1; these lines are printed. Arguments after -- are the script's.

  zero-plan run train.py --config ds.json --world-size 64 --ranks-per-node 8
"""


def add_run_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `run` to the parser of `zero-plan`: ``run(options)`` of its parsed options prints the plan of a
    script and returns the exit status. The caller sets ``options.script_arguments``, the arguments after ``--``.
    """
    parser = subparsers.add_parser(
        "run",
        help="a dry run of the engine with your training script",
        description=_RUN,
        usage="zero-plan run TARGET --world-size N [options] [-- ARGUMENTS OF TARGET]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="a training script that calls zero_core.initialize, or DeepSpeed's names for it")
    parser.add_argument("-m", "--module", action="store_true", help="TARGET is a module, as in python -m")
    parser.add_argument(
        "--config", metavar="FILE", help="the engine's configuration, instead of the script's; \"auto\" is the script's"
    )
    add_plan_arguments(parser)
    parser.set_defaults(run=_run_script_plan, script_arguments=())


def _run_script_plan(options: argparse.Namespace) -> int:
    """Print the plan of the script that the options of `zero-plan run` name; return the exit status of `print_plan`.
    Lines of code that got guessed values are printed to standard error. Raises `PlanError` for a script that cannot be
    planned and for wrong options.
    """
    config = None if options.config is None else read_configuration(options.config)
    machine = machine_from_options(options)
    script = Script(options.target, tuple(options.script_arguments), options.module, config)
    with progress(f"run {options.target}"):
        found, lines = plan_script(
            script,
            world_size=options.world_size,
            ranks_per_node=options.ranks_per_node,
            ranks=options.rank,
            checkpoint=options.checkpoint,
            saved_by=options.saved_by,
        )
    for line in lines:
        print(f"zero-plan run: {line} reads a value, which a dry run does not have; it got 1 or False", file=sys.stderr)
    return print_plan(found, machine, options, f"plan of {options.target}")
