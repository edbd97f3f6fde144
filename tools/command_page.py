"""Write docs/reference/command-lines.md from the parsers of the commands. The packages must be importable.

`python tools/command_page.py` writes the page; with `--check` it only compares, and its exit status says the outcome.
Found are the console scripts of all packages, the subcommands of their parsers, and the words in `WORDS` by which a
script starts another parser. Run by `nox -s lint`.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "command-lines.md"
WORDS = {"zero-launch": ("doctor", "slurm-script")}
MODULES = {"python -m zero_deepspeed": "zero_deepspeed.__main__:main"}
"""Commands that are no console script of a package."""
HEAD = """# Command lines

Every command of every package, with all of its arguments. `tools/command_page.py` writes this page from the parsers.
Every command has `--help`.

DeepSpeed's commands `deepspeed` and `ds_report` come with zero-deepspeed, in the folder that
`python -m zero_deepspeed --bin` prints. `deepspeed` takes the arguments of `zero-launch`.
"""


class ParserMet(Exception):
    """Carries the parser out of a command that has begun to parse its arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def parser_of(target: str, *words: str) -> argparse.ArgumentParser:
    """Return the parser that the command `module:function` uses for ``words``."""

    def meet(parser: argparse.ArgumentParser, *args: object, **options: object) -> None:
        raise ParserMet(parser)

    module, _, function = target.partition(":")
    run = getattr(import_module(module), function)
    with patch.object(argparse.ArgumentParser, "parse_known_args", meet):
        try:
            run([*words]) if run.__code__.co_argcount else run()
        except ParserMet as met:
            return met.parser
    raise ValueError(f"{target} does not parse its arguments with argparse")


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of every command."""
    packages = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    for script in sorted(entry_points(group="console_scripts"), key=lambda script: script.name):
        if script.dist is not None and script.dist.name in packages:
            yield parser_of(script.value)
            yield from (parser_of(script.value, word) for word in WORDS.get(script.name, ()))
    yield from (parser_of(target) for target in MODULES.values())


def section(parser: argparse.ArgumentParser, about: str, level: int) -> Iterator[str]:
    """Yield the lines about a parser and its subcommands; ``about``: what the command does."""
    yield from ("", f"{'#' * level} `{parser.prog}`", *paragraphs(about))
    own = [action for action in parser._actions if is_argument(action)]
    if own:
        yield from ("", "| argument | meaning |", "|---|---|")
        yield from (f"| {written(action)} | {meaning(parser, action)} |" for action in own)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                yield from section(child, child.description or helps.get(name, ""), level + 1)


def is_argument(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help != argparse.SUPPRESS


def written(action: argparse.Action) -> str:
    """Return an argument as a user writes it: its names and its value."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    if not value and action.nargs != 0:
        value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    return ", ".join(f"`{name} {value}`" if value else f"`{name}`" for name in action.option_strings)


def meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return an argument's help, with its choices where the argument itself does not show them."""
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    if action.choices and action.metavar:
        text += f" ({', '.join(map(str, action.choices))})"
    if isinstance(action, argparse._VersionAction):
        text = "print the version and end"
    elif isinstance(action.default, str | int | float) and action.nargs != 0 and "default" not in text:
        text += f" (default: {action.default})" if action.default not in ("", argparse.SUPPRESS) else ""
    return re.sub(r"([\[\]<*|])", r"\\\1", " ".join(text.split()))


def paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a description: prose as sentences, indented lines (examples) as code, blank lines between."""
    for indented, lines in itertools.groupby(text.strip("\n").splitlines(), lambda line: line.startswith("  ")):
        block = [line for line in lines if line.strip()]
        if indented:
            yield from ("", "```", *textwrap.dedent("\n".join(block)).splitlines(), "```")
        elif block:
            prose = " ".join(" ".join(block).split())
            yield from ("", prose[:1].upper() + prose[1:] + ("" if prose.endswith((".", ":", "?")) else "."))


def page() -> str:
    """Return the whole page."""
    lines = [line for parser in parsers() for line in section(parser, parser.description or "", 2)]
    return HEAD + "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check_only = parser.parse_args(arguments).check
    made = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made:
        print(f"{PAGE.relative_to(ROOT)} has every command")
        return 0
    if check_only:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run `python tools/command_page.py` in the shared environment")
        return 1
    PAGE.write_text(made, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
