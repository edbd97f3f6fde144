"""Build the documentation's site: build/site, from docs/ and the README of every package. Run by `nox -s docs`.

Zensical reads one folder of pages, so the pages are copied to build/pages first, and links between them follow. The
build is strict: a link without a page or heading fails it, and so does a public name that no page of docs/api shows.
In what was built, the answer to each of docs/questions.md has to be two clicks from the front page.
Needs zensical and mkdocstrings, and none of the packages: names and docstrings are read from the sources.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from check_docs import FENCE, QUESTIONS, ROOT, SHOWN, exported

DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
TAG = re.compile(r"<[^>]*>")
ROW = re.compile(r"<tr>\s*<td>(.*?\?)</td>\s*<td>(.*?)</td>", re.DOTALL)
HREF = re.compile(r'href="(?![a-z]+:)([^"#]*)#?([^"]*)"')
"""A row of the table of questions, and a link within the site with its anchor."""
TARGET = re.compile(r"(?<=\]\()(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]+)?(?=\))")


class SiteError(Exception):
    """A page that the site cannot have as it is."""


def packages() -> list[Path]:
    """Return the folders of all packages, sorted."""
    return sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def sources() -> dict[Path, Path]:
    """Return the files of the site, pages and pictures, each with its place below build/pages."""
    found = {path: path.relative_to(DOCS) for path in sorted(DOCS.rglob("*")) if path.is_file()}
    found |= {package / "README.md": Path("readme") / f"{package.name}.md" for package in packages()}
    found[ROOT / "SECURITY.md"] = Path("reporting.md")
    return {path: place for path, place in found.items() if "__pycache__" not in place.parts}


def moved(source: Path, text: str, places: dict[Path, Path]) -> str:
    """Return a page's text with the relative links as they are at its place. Raises SiteError for a link to nowhere."""

    def follow(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match["path"]):
            return match[0]
        aim = (source.parent / match["path"]).resolve()
        if aim not in places:
            raise SiteError(f"{source.relative_to(ROOT)}: link to {match['path']}, which the site does not have")
        return os.path.relpath(places[aim], places[source].parent) + (match["anchor"] or "")

    return "".join(piece if index % 2 else TARGET.sub(follow, piece) for index, piece in enumerate(fenced_apart(text)))


def fenced_apart(text: str) -> Iterator[str]:
    """Yield a page's text in pieces: prose and code blocks in turn, prose first."""
    end = 0
    for match in FENCE.finditer(text):
        yield text[end : match.start()]
        yield match[0]
        end = match.end()
    yield text[end:]


def copy_pages() -> None:
    """Write build/pages again."""
    shutil.rmtree(PAGES, ignore_errors=True)
    places = sources()
    for source, place in places.items():
        target = PAGES / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(moved(source, source.read_text(encoding="utf-8"), places), encoding="utf-8")
        else:
            shutil.copyfile(source, target)


def not_shown() -> Iterator[str]:
    """Yield a complaint about every package without a page of its names, and every public name that is not on it."""
    for package in packages():
        page = DOCS / "api" / f"{package.name}.md"
        if not page.is_file():
            yield f"docs/api/{page.name} is missing: it shows the public names of {package.name}"
            continue
        built = (SITE / "api" / package.name / "index.html").read_text(encoding="utf-8")
        shown = SHOWN.findall(page.read_text(encoding="utf-8"))
        for full in (f"{module}.{name}" for module in shown for name in exported(module)):
            # A name that a module of the package has too is shown by itself, from that module.
            own = f"{full}.{full.rpartition('.')[2]}"
            if f'id="{full}"' not in built and full not in shown and own not in shown:
                yield f"docs/api/{page.name}: {full} is public and not on the built page; does it have a docstring?"


def not_listed() -> Iterator[str]:
    """Yield a complaint about every page without its Markdown beside it, or that llms.txt does not name."""
    listing = (SITE / "llms.txt").read_text(encoding="utf-8")
    for page in sorted(SITE.rglob("index.html")):
        place = page.parent.relative_to(SITE)
        if not page.with_suffix(".md").is_file():
            yield f"{place}: the page has no Markdown beside it; list it for llmstxt in zensical.toml"
        elif f"(<{place / 'index.md'}>)" not in listing:
            yield f"{place}: llms.txt does not name the page"


def plain(text: str) -> str:
    """Return the text of a piece of HTML."""
    return html.unescape(TAG.sub("", text))


def is_there(page: Path, anchor: str) -> bool:
    """Return whether the built site has a page in this folder, with this heading unless ``anchor`` is empty."""
    file = page / "index.html"
    return file.is_file() and (not anchor or f'id="{anchor}"' in file.read_text(encoding="utf-8"))


def not_answered() -> Iterator[str]:
    """Yield a complaint about every question whose answer is not two clicks from the front page of the built site: the
    page of questions, then each link of the row, to a heading that is there. The search has to know the question, too.
    """
    if 'href="questions/"' not in (SITE / "index.html").read_text(encoding="utf-8"):
        yield "index.html: no link to the questions"
    folder = SITE / "questions"
    rows = ROW.findall((folder / "index.html").read_text(encoding="utf-8"))
    if len(rows) < QUESTIONS:
        yield f"questions: expected at least {QUESTIONS} questions on the built page, got {len(rows)}"
    items = json.loads((SITE / "search.json").read_text(encoding="utf-8"))["items"]
    searched = plain(" ".join(item["text"] for item in items if item["location"].startswith("questions/")))
    for question, answer in ((plain(question), answer) for question, answer in rows):
        links = HREF.findall(answer)
        if not links or not all(is_there(folder / path, anchor) for path, anchor in links):
            yield f"questions: {question} a link to its answer leads nowhere on the built site, or there is none"
        if question not in searched:
            yield f"questions: {question} the search index does not have it"


def main() -> int:
    """Build the site; print every complaint; the exit status is 1 when there is one."""
    try:
        copy_pages()
    except SiteError as error:
        print(error)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, check=False)
    if built.returncode:
        return 1
    complaints = [*not_shown(), *not_listed(), *not_answered()]
    print("\n".join(complaints) or f"site: {len(list(SITE.rglob('index.html')))} pages in {SITE.relative_to(ROOT)}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
