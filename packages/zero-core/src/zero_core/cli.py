"""The command `zero-core`: look at a configuration, verify training.

Starting it imports neither torch nor pydantic; a command imports what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_core import __version__
from zero_core.errors import UsageError

from .verify_command import add_verify_command

if TYPE_CHECKING:
    from zero_core.config import Config

def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 good, 1 what was checked is not, 2 a wrong call.

    ``arguments``: the words after the program's name; by default those of the process. What follows ``--`` is for the
    script that the command runs.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = _parser()
    options = parser.parse_args(words[:split])
    if words[split + 1 :] and not hasattr(options, "script_arguments"):
        parser.error(f"{options.command} runs no script that could take {' '.join(words[split + 1 :])}")
    options.script_arguments = tuple(words[split + 1 :])
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        print(f"zero-core {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zero-core", description="Check a configuration; verify training."
    )
    parser.add_argument("--version", action="version", version=f"zero-core {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_config_command(commands)
    add_verify_command(commands)
    return parser


_CHECK = """\
Read a configuration as `zero_core.initialize` does and print every value with its origin: user, default, derived, or
what "auto" became. Exit status 1, with every problem by its path, for a file that `initialize` would refuse.
"""


def add_config_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `config check` and `config schema` to the commands of a parser; the parsed namespace's `run(namespace)`
    returns the exit status."""
    parser = subparsers.add_parser("config", help="check a configuration file, or print the schema of one")
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="command")

    check = commands.add_parser("check", help="print what a configuration file resolves to", description=_CHECK)
    check.add_argument("file", help="a JSON file")
    check.add_argument(
        "--world-size", type=_ranks, default=1, metavar="N", help="ranks to resolve batch sizes for (default: 1)"
    )
    check.add_argument("--no-defaults", action="store_true", help="only the values that are not defaults")
    check.add_argument("--json", action="store_true", help="print a JSON list of the rows instead of a table")
    check.set_defaults(run=_check)

    schema = commands.add_parser("schema", help="print the JSON Schema of a configuration file, for editors")
    schema.set_defaults(run=_schema)
    return parser


def _check(arguments: argparse.Namespace) -> int:
    from zero_core.config import Config, ConfigError

    try:
        config = Config.load(arguments.file, world_size=arguments.world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps([row._asdict() for row in config.report(defaults=not arguments.no_defaults)], indent=2))
    else:
        _print_table(config, arguments.file, defaults=not arguments.no_defaults)
    return 0


def _schema(_arguments: argparse.Namespace) -> int:
    from zero_core.config import Config

    print(json.dumps(Config.json_schema(), indent=2))
    return 0


def _print_table(config: Config, file: str, *, defaults: bool) -> None:
    """Print one row per value; into a file or a pipe every row is one line, however long."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    ranks = f"{config.world_size} rank{'s' if config.world_size > 1 else ''}"
    table = Table("key", "value", "origin", "note", title=Text(f"{file} for {ranks}"), title_justify="left")
    for row in config.report(defaults=defaults):
        style = "dim" if row.provenance == "default" else ""
        cells = (row.path, json.dumps(row.value), row.provenance, row.note)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells), style=style)
    console = Console()
    if not console.is_terminal:
        unlimited = console.options.update(max_width=sys.maxsize)
        console.width = console.measure(table, options=unlimited).maximum
    console.print(table)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected the number of ranks, an integer >= 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
