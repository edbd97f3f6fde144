"""The command `zero-core`: check a configuration, and the commands that other packages add.

A package adds a command by an entry point of the group `zero_core.commands`: `NAME = "module:function"`. The function
gets argparse's subparsers and adds a parser whose default `run` is a function from the parsed namespace to the exit
status. Starting `zero-core` imports neither torch nor pydantic; a command imports what it needs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoints, entry_points
from typing import NoReturn

from zero_core import __version__
from zero_core.errors import UsageError
from zero_settings.command import add_config_command

_PACKAGE_OF_COMMAND = {"verify": "zero-verify"}
"""Commands of other packages, for the error message where a package is not installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 for success, 1 if a check failed, 2 for a usage error.
    ``arguments``: the words after the program's name, by default this process's. Words after ``--`` are for the
    command's script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    package = _PACKAGE_OF_COMMAND.get(words[0]) if words else None
    if package is not None and words[0] not in _command_entry_points().names:
        print(f"zero-core {words[0]} is in {package}, which is not installed: pip install {package}", file=sys.stderr)
        return 2
    options = parser().parse_args(words[:split])
    if words[split + 1 :] and not hasattr(options, "script_arguments"):
        parser().error(f"{options.command} runs no script that could take {' '.join(words[split + 1 :])}")
    options.script_arguments = tuple(words[split + 1 :])
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        print(f"zero-core {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _command_entry_points() -> EntryPoints:
    """Return the entry points by which installed packages add commands to `zero-core`."""
    return entry_points(group="zero_core.commands")


class _Parser(argparse.ArgumentParser):
    """A parser whose error for an unknown word suggests the most similar known one. Named as the parsers of other
    commands."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the ``message``, with the most similar known word if it is about an unknown one; exit
        with status 2."""
        import difflib

        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(unknown[1], re.findall(r"[\w.-]+", unknown[2]), n=1) if unknown else []
        super().error(f"{message}; did you mean {near[0]!r}?" if near else message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `zero-core`, with the commands that installed packages add."""
    parser: argparse.ArgumentParser = _Parser(
        prog="zero-core",
        description="Check a configuration; verify training.",
        epilog="example: zero-core config check ds.json --world-size 8",
    )
    parser.add_argument("--version", action="version", version=f"zero-core {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_config_command(commands)
    for entry in _command_entry_points():
        entry.load()(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
