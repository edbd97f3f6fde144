"""The pages name what there is: attributes of the engine, names of the packages' modules, keys of the configuration,
source files, subcommands and options of the commands."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pages import blocks

from zero_core import Engine
from zero_settings import REMOVED_KEYS, known_keys

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md"), ROOT / "README.md"])
OF_ENGINE = re.compile(r"\bengine\.(\w+)")
OF_MODULE = re.compile(r"\bzero_[a-z_]+(?:\.\w+)+")
KEY = re.compile(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)+)`")
FILES = (".json", ".md", ".py")
SOURCE = re.compile(r"`(?:[\w.-]+/)*([\w-]+\.(?:py|cpp|hpp|h))`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SOURCES = ("packages", "tests-integration", "tools", "docs/examples")
OTHER_SOURCES = {"train.py", "ds_to_universal.py", "noxfile.py"}
"""A reader's script, DeepSpeed's, and the root's."""
SPAN = re.compile(r"`(zero-[a-z-]+) ([a-z][\w-]*)")
LINE = re.compile(r"^ *(zero-[a-z-]+) ([a-z][\w-]*)", re.MULTILINE)
"""A command and its first word, between backticks and on a line of a block."""
CALL = re.compile(r"(?<![\w/.-])(zero-(?:ckpt|core|launch|nvme-aio|plan|report)) ([^`|>\n]*)")
NO_KEYS = {"optimizer", "scheduler"}
"""Sections whose names are also those of objects with attributes."""
OTHER_ENGINE = {"zero-nvme-aio", "zero-report"}
"""Packages whose READMEs name attributes of an engine of their own."""
OTHER_FILES = {"unit-tests.md"}
"""Pages that name the files of another project."""
NOT_NAMES = {"zero_launch.as", "zero_core.commands", "zero_launch.leftovers"}
"""Groups of entry points."""
WITH_EXTRA = ("zero_launch.ray", "zero_nvme_aio.gds")
"""Modules that cannot be imported without what their extra brings."""


@functools.cache
def engine_names() -> frozenset[str]:
    """Return the attributes of engines, with those that the constructor sets."""
    return frozenset({*dir(Engine), *re.findall(r"\bself\.(\w+)", inspect.getsource(Engine))})


def exists(dotted: str) -> bool:
    """Return whether a name of a module exists; parts that are functions of the same name as a module count as both."""
    parts = dotted.split(".")
    found: object = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            return dotted.startswith(WITH_EXTRA) or (callable(found) and part == parts[number - 2])
    return True


def is_key(path: str) -> bool:
    """Return whether a dotted path is one of the configuration's keys, or leads into one that takes any map."""
    parts = path.split(".")
    for depth, part in enumerate(parts):
        try:
            if part not in known_keys(".".join(parts[:depth])):
                return path in REMOVED_KEYS
        except KeyError:
            return True
    return True


@functools.cache
def source_names() -> frozenset[str]:
    """Return the names of the source files of this repository."""
    return frozenset(path.name for folder in SOURCES for path in (ROOT / folder).rglob("*.*"))


@functools.cache
def options_of() -> dict[str, set[str]]:
    """Return the options of each command, by the page that is written from the parsers."""
    page = (ROOT / "docs" / "reference" / "command-lines.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for section in page.split("\n## `")[1:]:
        command = re.split(r"[` ]", section, maxsplit=1)[0]
        found.setdefault(command, {"--help"}).update(re.findall(r"`(--[\w-]+)", section))
    return found


@functools.cache
def subcommands_of() -> dict[str, set[str]]:
    """Return the subcommands of each command that begins with one, by the same page."""
    page = (ROOT / "docs" / "reference" / "command-lines.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for command, name in re.findall(r"^### `([\w-]+) ([\w-]+)`$", page, re.MULTILINE):
        found.setdefault(command, set()).add(name)
    return found


def unknown_options(text: str) -> Iterator[str]:
    """Yield the options with which a page calls a command that has no such option; a script's own are not looked at."""
    for command, words in CALL.findall(text.replace("\\\n", " ")):
        for word in words.split():
            if word == "--" or (command == "zero-launch" and word.endswith(".py")):
                break
            option = re.match(r"--[\w-]+", word)
            if option and option[0] not in options_of()[command]:
                yield f"{command} {option[0]}"


def unknown_subcommands(text: str) -> Iterator[str]:
    """Yield the subcommands that a page calls, in a block of commands or between backticks, and there are not."""
    called = [*SPAN.findall(FENCE.sub("", text))]
    called += [pair for block in blocks(text) if block.language == "sh" for pair in LINE.findall(block.body)]
    for command, name in called:
        if name not in subcommands_of().get(command, {name}):
            yield f"{command} {name}"


def paths(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key of a configuration."""
    for name, value in section.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{name}.")


def unknown_keys(text: str) -> Iterator[str]:
    """Yield the keys that a page's JSON examples of a configuration have and there are not."""
    for block in blocks(text):
        if block.language == "json":
            found = json.loads(block.body)
            if isinstance(found, dict) and set(found) & set(known_keys("")):
                yield from (path for path in paths(found) if not is_key(path))


def unknown(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    own = set(re.findall(r"[\w-]+\.\w+", " ".join(FENCE.findall(text))))
    if page.name not in OTHER_FILES:
        yield from sorted(set(SOURCE.findall(FENCE.sub("", text))) - source_names() - OTHER_SOURCES - own)
    yield from unknown_subcommands(text)
    yield from unknown_options(text)
    yield from unknown_keys(text)
    if page.parent.name not in OTHER_ENGINE:
        names = {name for name in OF_ENGINE.findall(text) if name not in engine_names() | {"py"}}
        yield from sorted(f"engine.{name}" for name in names)
    for dotted in sorted(set(OF_MODULE.findall(text)) - NOT_NAMES):
        package = dotted.split(".")[0]
        known = dotted.endswith(FILES) or not (ROOT / "packages" / package.replace("_", "-")).is_dir()
        if not known and not exists(dotted):
            yield dotted
    for path in sorted(set(KEY.findall(text))):
        section = path.split(".")[0]
        if section in set(known_keys("")) - NO_KEYS and not path.endswith(FILES) and not is_key(path):
            yield path


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("engine.stepp() engine.step() `zero_core.Engin` zero_core.Engine `fp16.enabled` `fp16.enable`")
    assert list(unknown(page)) == ["engine.stepp", "zero_core.Engin", "fp16.enable"]
    page.write_text(
        "`engine.py` `gone.py` `mine.py`\n\n```sh\nzero-launch --nproc 2 mine.py --gone\nzero-launch --gone a.py\n```"
    )
    assert list(unknown(page)) == ["gone.py", "zero-launch --gone"]
    page.write_text("`zero-ckpt inspect --gone`, `zero-core verify train.py --steps 3 -- --mine`")
    assert list(unknown(page)) == ["zero-ckpt --gone"]
    page.write_text("`zero-ckpt gone DIR`, `zero-launch mine.py`\n\n```sh\nzero-plan gone\nzero-plan fit\n```\n")
    assert list(unknown(page)) == ["zero-ckpt gone", "zero-plan gone"]
    page.write_text('```json\n{"fp16": {"enabled": true, "gone": 1}, "gone": {"stage": 1}}\n```\n')
    assert list(unknown(page)) == ["fp16.gone", "gone", "gone.stage"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_on_a_page_exist(page: Path) -> None:
    assert not list(unknown(page))
