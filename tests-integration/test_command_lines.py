"""Every command says its version, has an example in its help, suggests a command for a misspelt one, and its words can
be completed by a shell."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest

COMMANDS = {each.name: each for each in entry_points(group="console_scripts") if each.name.startswith("zero-")}
MISSPELT = {
    "zero-ckpt": ("convrt", "convert"),
    "zero-core": ("confg", "config"),
    "zero-launch": ("doctr", "zero-launch doctor"),
    "zero-nvme-aio": ("prob", "probe"),
    "zero-plan": ("estimat", "estimate"),
}

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "complete-commands.md"
PARSERS = dict(re.findall(r"^\| `(zero-[a-z-]+)` \| `([a-z_.]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
BEGUN = {
    "zero-ckpt": {"in": "inspect", "convert --over": "--overwrite", "convert --to pyt": "pytorch"},
    "zero-core": {"conf": "config", "config ch": "check"},
    "zero-launch": {"--hostf": "--hostfile"},
    "zero-nvme-aio": {"pro": "probe", "bench --pa": "--path"},
    "zero-plan": {"estim": "estimate", "run --world": "--world-size"},
    "zero-report": {"--perf": "--perfetto"},
}
COMPLETE = """
source "$1"
function=$(complete -p "$2" | grep -o -- '-F [^ ]*' | cut -c4-)
COMP_WORDS=("${@:2}")
COMP_CWORD=$(($# - 2))
$function
echo "${COMPREPLY[@]}"
"""


def run(command: EntryPoint, *arguments: str) -> subprocess.CompletedProcess[str]:
    module, _, function = command.value.partition(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_its_version_and_shows_an_example(name: str) -> None:
    command = COMMANDS[name]
    assert command.dist is not None
    shown = run(command, "--version")
    assert (shown.returncode, shown.stdout) == (0, f"{name} {version(command.dist.name)}\n"), shown.stderr
    assert "example" in run(command, "--help").stdout


def test_the_module_of_deepspeeds_names_says_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "zero_deepspeed", "--version"], capture_output=True, text=True)
    assert done.stdout == f"zero-deepspeed {version('zero-deepspeed')}\n"


def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command of a parser that has none below it."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not found:
        yield ()
    for name, child in (item for action in found for item in action.choices.items()):
        yield from ((name, *words) for words in subcommands(child))


def parser_of(name: str) -> argparse.ArgumentParser:
    module, _, function = PARSERS[name].rpartition(".")
    made = getattr(importlib.import_module(module), function)()
    assert isinstance(made, argparse.ArgumentParser)
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_shows_an_example_that_it_takes(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = parser_of(name)
    for words in subcommands(parser):
        with pytest.raises(SystemExit):
            parser.parse_args([*words, "--help"])
        shown = re.sub(r"\\\n *", "", capsys.readouterr().out)
        examples = re.findall(rf"^ *(?:examples?: +)?{' '.join((name, *words))}(?: .*)?$", shown, re.MULTILINE)
        assert examples, words
        for example in examples:
            parser.parse_args(shlex.split(example.partition(name)[2].partition(" >")[0].partition("   ")[0]))


def test_commands_of_zero_launch_with_a_parser_of_their_own_show_an_example() -> None:
    for word in ("doctor", "slurm-script"):
        assert f"example: zero-launch {word} --" in run(COMMANDS["zero-launch"], word, "--help").stdout


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_command_is_answered_with_the_nearest(name: str) -> None:
    wrong, right = MISSPELT[name]
    done = run(COMMANDS[name], wrong)
    assert done.returncode == 2 and done.stdout == ""
    assert f"did you mean {right!r}?" in done.stderr


def test_a_misspelt_value_of_an_option_is_too() -> None:
    done = run(COMMANDS["zero-ckpt"], "convert", "a", "b", "--to", "pytoch")
    assert done.returncode == 2 and "did you mean 'pytorch'?" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shell_completes_its_words(name: str, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    written = [sys.executable, "-m", "shtab", "--shell", "bash", PARSERS[name]]
    script = tmp_path / "completion"
    script.write_text(subprocess.run(written, capture_output=True, text=True, check=True).stdout)
    for begun, word in BEGUN[name].items():
        asked = [bash, "-c", COMPLETE, "bash", str(script), name, *begun.split()]
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split() == [word], begun
