"""Every command says its version, has an example in its help, and suggests a command for a misspelt one."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version

import pytest

COMMANDS = {each.name: each for each in entry_points(group="console_scripts") if each.name.startswith("zero-")}
MISSPELT = {
    "zero-ckpt": ("convrt", "convert"),
    "zero-core": ("confg", "config"),
    "zero-nvme-aio": ("prob", "probe"),
    "zero-plan": ("estimat", "estimate"),
}


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


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_command_is_answered_with_the_nearest(name: str) -> None:
    wrong, right = MISSPELT[name]
    done = run(COMMANDS[name], wrong)
    assert done.returncode == 2 and done.stdout == ""
    assert f"did you mean {right!r}?" in done.stderr


def test_a_misspelt_value_of_an_option_is_too() -> None:
    done = run(COMMANDS["zero-ckpt"], "convert", "a", "b", "--to", "pytoch")
    assert done.returncode == 2 and "did you mean 'pytorch'?" in done.stderr
