"""The workflows call what there is: sessions of noxfile.py, versions of torch that have one, scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
SESSIONS = set(re.findall(r"^def (\w+)\(session: nox\.Session", NOXFILE, re.MULTILINE))
CALLED = re.compile(r"(?:nox -s|tools/dev\.py) \"?(\w+)")
LISTED = re.compile(r"^ +session: \[(.*)\]$", re.MULTILINE)
SCRIPT = re.compile(r"\b(?:tools|tests-integration)/\w+\.py\b")
TORCH = re.compile(r"nox -s \"torch\(\$\{\{ matrix\.version \}\}\)\"")
VERSIONS = re.compile(r"^ +version: \[(.*)\]$", re.MULTILINE)


def missing(text: str) -> Iterator[str]:
    """Yield what a workflow calls and there is not."""
    sessions = {*CALLED.findall(text), *(name for names in LISTED.findall(text) for name in names.split(", "))}
    yield from sorted(sessions - SESSIONS)
    yield from sorted(name for name in set(SCRIPT.findall(text)) if not (ROOT / name).is_file())
    if TORCH.search(text):
        versions = {version.strip('" ') for names in VERSIONS.findall(text) for version in names.split(",")}
        yield from sorted(f"torch({version})" for version in versions if f'"{version}"' not in NOXFILE)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_calls_exists(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    assert CALLED.search(text) or SCRIPT.search(text)
    assert not list(missing(text))


def test_a_call_of_what_is_missing_is_found() -> None:
    text = """
        session: [lint, gone]
        version: ["2.8", "0.9", newest]
      - run: python -m nox -s "torch(${{ matrix.version }})"
      - run: python tools/dev.py lost
      - run: python tools/absent.py
"""
    assert list(missing(text)) == ["gone", "lost", "tools/absent.py", "torch(0.9)"]
