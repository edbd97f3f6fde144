"""The commands `config check` and `config schema`, which look at a configuration file.

Adding them to a parser imports neither torch nor pydantic; running one imports what it needs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config

_CHECK = """\
Read a configuration as `zero_core.initialize` does and print every value with its origin: user, default, derived, or
what "auto" became. Exit status 1, with every problem by its path, for a file that `initialize` would refuse.
"""


def add_config_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `config check` and `config schema` to ``subparsers``, and return the parser of `config`.

    The namespace that parsing returns has an attribute `run`: `run(namespace)` runs the command and returns the exit
    status."""
    parser = subparsers.add_parser("config", help="check a configuration file, or print the schema of one")
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="command")

    check = commands.add_parser(
        "check",
        help="print what a configuration file resolves to",
        description=_CHECK,
        epilog="example: zero-core config check ds.json --world-size 8 --no-defaults",
    )
    check.add_argument("file", help="a JSON file")
    check.add_argument(
        "--world-size", type=_rank_count, default=1, metavar="N", help="ranks to resolve batch sizes for (default: 1)"
    )
    check.add_argument("--no-defaults", action="store_true", help="only the values that are not defaults")
    check.add_argument("--json", action="store_true", help="print a JSON list of the rows instead of a table")
    check.set_defaults(run=_run_check)

    schema = commands.add_parser(
        "schema",
        help="print the JSON Schema of a configuration file, for editors",
        epilog="example: zero-core config schema > ds.schema.json",
    )
    schema.set_defaults(run=_run_schema)
    return parser


def _run_check(arguments: argparse.Namespace) -> int:
    """Print what the file ``arguments.file`` resolves to, as a table or JSON, and return 0. If it is not valid, print
    its problems to standard error and return 1."""
    from .config import Config
    from .errors import ConfigError

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


def _run_schema(_arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a configuration file; return the exit status 0."""
    from .config import Config

    print(json.dumps(Config.json_schema(), indent=2))
    return 0


def _print_table(config: Config, file: str, *, defaults: bool) -> None:
    """Print a table with one row per value of ``config``, headed by ``file``, the name of its file. Without
    ``defaults``, rows of values that are defaults are left out.

    If the output is not a terminal, every row is one line, however long."""
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


def _rank_count(text: str) -> int:
    """Return the number of ranks, 1 or more, that an argument's text stands for. Raises ArgumentTypeError for any other
    text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected the number of ranks, an integer >= 1, got {text!r}")
    return int(text)
