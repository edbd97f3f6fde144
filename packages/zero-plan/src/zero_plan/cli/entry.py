"""The parser of `zero-plan` and the call of the chosen command."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..errors import PlanError, nearest
from .estimate_command import add_estimate_command
from .fit_command import add_fit_command
from .machine_command import add_machine_command, add_probe_command
from .model_command import add_model_command
from .run_command import add_run_command
from .table_command import add_table_command


class _Parser(argparse.ArgumentParser):
    """A parser that suggests, for an unknown word, the known word that is spelt most like it. Named as the parsers of
    other commands.
    """

    def error(self, message: str) -> NoReturn:
        """Print the usage and ``message``, with the most similar known word if the message is about an unknown one, and
        exit with status 2.
        """
        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        super().error(message + nearest(unknown[1], re.findall(r"[\w.-]+", unknown[2])) if unknown else message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with all commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="zero-plan",
        description="Say what a training run needs, before it runs.",
        epilog="example: zero-plan run train.py --config ds.json --world-size 64",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zero-plan {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_estimate_command(commands)
    add_fit_command(commands)
    add_model_command(commands)
    add_run_command(commands)
    add_table_command(commands)
    add_machine_command(commands)
    add_probe_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return the exit status.

    The status is 0 if all is done (also if the reader of the output is gone), 1 if the run does not fit, 2 for wrong
    arguments, 3 if it is unknown whether the run fits. Arguments that the parser itself refuses end the program with
    status 2. ``arguments``: those after the program's name; by default those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:end])
    if "script_arguments" not in options and words[end:]:
        parser().error(f"{options.command} takes no arguments after --")
    options.script_arguments = tuple(words[end + 1 :])
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except PlanError as error:
        print(f"zero-plan {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; at exit nothing is flushed into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
