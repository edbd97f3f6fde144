"""Runs a page of docs/ from its own text, as a reader does who copies every block.

A block whose fence has ``title="NAME"`` is written to that file. A ``diff`` of a whole file gives that file as it is
after the change, and before.py as it was. A block ``sh`` runs, in one folder for the whole page. A block ``text`` after
it is the output: each of its lines has to be a line of what the commands printed, in this order; ``…`` stands for
anything. Other blocks are only looked at. The page's folder is the home folder, too.

`python pages.py PAGE FOLDER` runs one page with the interpreter's own environment; it needs the standard library alone.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_FENCE = re.compile(r"^```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One code block of a page: its language, its title (empty if it has none), its text and its line on the page."""

    language: str
    title: str
    body: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["rest"])
        yield Block(match["language"], title[1] if title else "", match["body"], text.count("\n", 0, match.start()) + 1)


def run_page(page: Path, folder: Path) -> int:
    """Do in ``folder`` what the page says and return the number of commands' blocks; assert that the outputs match."""
    ran, printed = 0, ""
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(DOCS.parent)}:{block.line}"
        if block.title:
            for name, text in files(block):
                (folder / name).write_text(text, encoding="utf-8")
        elif block.language == "sh":
            printed = run_commands(block.body, folder, where)
            ran += 1
        elif block.language == "text":
            assert printed, f"{where}: no command stands before this output"
            check_output(block.body, printed, where)
    return ran


def files(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the names and contents of the files that a block with a title stands for."""
    if block.language != "diff":
        yield block.title, block.body
        return
    lines = block.body.splitlines(keepends=True)
    yield "before.py", "".join(line[1:] for line in lines if not line.startswith("+"))
    yield block.title, "".join(line[1:] for line in lines if not line.startswith("-"))


def run_commands(commands: str, folder: Path, where: str) -> str:
    """Run the commands of one block and return what they printed; one that fails ends the page."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, f"{where}: exit status {done.returncode}\n{done.stdout}"
    return done.stdout


def check_output(expected: str, printed: str, where: str) -> None:
    """Assert that the lines of ``expected`` are lines of ``printed``, in order."""
    lines = iter(printed.splitlines())
    for wanted in (line.rstrip() for line in expected.splitlines()):
        pattern = re.compile(".*".join(map(re.escape, wanted.split("…"))))
        if wanted not in ("", "…"):
            found = any(pattern.fullmatch(line.rstrip()) for line in lines)
            assert found, f"{where}: expected the line\n  {wanted}\nin this order in\n{printed}"


def installed(page: Path) -> tuple[str, ...]:
    """Return what the page says to install: the arguments of its `pip install` commands, in order."""
    bodies = [block.body for block in blocks(page.read_text(encoding="utf-8")) if not block.title]
    lines = [line.partition("pip install ")[2] for body in bodies for line in body.splitlines()]
    return tuple(dict.fromkeys(word for line in lines for word in shlex.split(line, comments=True)))


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {run_page(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))} blocks of commands ran")
