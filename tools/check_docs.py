"""Check the Markdown pages: relative links and pictures lead to files and headings that exist, the examples parse, the
site has every page of docs/, every question is answered by a link, the front page's figures are those of the
benchmarks, the tests that docs/public-threads.md names exist, and no module hides a public name of the same name.

Standard library only. Python examples must be valid Python (a `>>>` session counts by its input lines), JSON examples
valid JSON; every script in docs/examples/ must compile.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FIGURE = re.compile(r"\d+\.\d+")
SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)
TEST = re.compile(r"`([\w./-]+\.py)::(\w+)`")
QUESTIONS = 20


def pages() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()})


def anchors(text: str) -> set[str]:
    """The anchors that Markdown renderers give to headings: lower case, no punctuation, hyphens for spaces."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        found.add(plain.replace(" ", "-"))
    return found


def broken_links(page: Path, text: str) -> Iterator[str]:
    for match in LINK.finditer(FENCE.sub("", text)):
        target = unquote(match["target"])
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists():
            yield f"{page.relative_to(ROOT)}: link to {target}, which is not there"
        elif on_the_site(page) and not on_the_site(aim):
            yield f"{page.relative_to(ROOT)}: link to {target}, which the site does not have"
        elif anchor and aim.suffix == ".md" and anchor not in anchors(aim.read_text(encoding="utf-8")):
            yield f"{page.relative_to(ROOT)}: link to {target}, but {aim.name} has no such heading"


def on_the_site(path: Path) -> bool:
    """Whether tools/build_site.py gives the site a page or picture for this file."""
    place = path.relative_to(ROOT).parts
    return place[0] == "docs" or place == ("SECURITY.md",) or (place[0] == "packages" and place[2:] == ("README.md",))


def not_on_the_site() -> Iterator[str]:
    """Complaints about pages that zensical.toml leaves out of the navigation, or out of the list for llms.txt.

    That list has folders by a pattern, and the pages of docs/ itself by name.
    """
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for page in (path for path in pages() if path.is_relative_to(ROOT / "docs")):
        name = page.relative_to(ROOT / "docs").as_posix()
        if text.count(f'"{name}"') < (1 if "/" in name else 2):
            more = "" if "/" in name else ", and in a section of `llmstxt`"
            yield f"docs/{name}: the site leaves it out; name it in zensical.toml, in `nav`{more}"


def unanswered(front: str, questions: str) -> Iterator[str]:
    """Complaints about docs/questions.md: it is one click from the site's front page, and each of its answers a second
    one. ``front``, ``questions``: the text of these pages."""
    if "](questions.md)" not in front:
        yield "docs/index.md: no link to questions.md"
    rows = [row.strip("| ").split(" | ", 1) for row in questions.splitlines() if "?" in row and row.startswith("|")]
    if len(rows) < QUESTIONS:
        yield f"docs/questions.md: expected at least {QUESTIONS} questions, got {len(rows)}"
    for question, answer in rows:
        if not LINK.search(answer):
            yield f"docs/questions.md: {question} no link answers it"


def not_measured(front: str, benchmarks: str) -> Iterator[str]:
    """Complaints about figures in the README's table "Measured" that no row of the same name in the benchmarks has.

    ``front``, ``benchmarks``: the text of these pages.
    """
    measured = [
        (line.split("|")[1].strip(), set(FIGURE.findall(line))) for line in benchmarks.splitlines() if "|" in line
    ]
    section = front.partition("## Measured")[2].partition("\n## ")[0]
    for line in (line for line in section.splitlines() if line.startswith("|") and FIGURE.search(line)):
        name, figures = line.split("|")[1].strip(), set(FIGURE.findall(line))
        if not any(name == other and figures <= theirs for other, theirs in measured):
            yield f"README.md: docs/benchmarks.md has no row {name!r} with {', '.join(sorted(figures))}"


def missing_tests(threads: str) -> Iterator[str]:
    """Complaints about docs/public-threads.md: each row links a thread and names tests that exist. ``threads``: the
    text of the page."""
    rows = [row for row in threads.splitlines() if row.startswith("| [")]
    if not rows:
        yield "docs/public-threads.md: expected rows that begin with a link"
    for row in rows:
        tests = TEST.findall(row)
        if "](https://" not in row or not tests:
            yield f"docs/public-threads.md: expected a link and a test `FILE::NAME` in {row}"
        for file, name in tests:
            text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
            if f"\ndef {name}(" not in text:
                yield f"docs/public-threads.md: there is no test {file}::{name}"


def module_file(module: str) -> Path:
    """The file of a dotted module of some package, whether it exists or not."""
    path = ROOT.joinpath("packages", module.split(".")[0].replace("_", "-"), "src", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exported(module: str) -> list[str]:
    """Return the names in `__all__` of a module of some package; none of what is no module or has no `__all__`."""
    file = module_file(module)
    nodes = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    lists = [node.value for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return [name for value in lists for name in ast.literal_eval(value)]


def hidden_names() -> Iterator[str]:
    """Complaints about public names that the site would not show: a module of the package has the same name, and the
    page does not show the name by itself, from that module."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        shown = SHOWN.findall(page.read_text(encoding="utf-8"))
        for module in shown:
            for name in exported(module):
                full, own = f"{module}.{name}", f"{module}.{name}.{name}"
                if module_file(full).is_file() and not {full, own} & set(shown):
                    yield f"docs/api/{page.name}: a module hides {full}; add a heading and `::: {own}`"


def parse_example(language: str, body: str) -> None:
    if language == "python":
        if body.lstrip().startswith(">>>"):
            body = "".join(example.source for example in doctest.DocTestParser().get_examples(body))
        ast.parse(body)
    elif language == "json":
        json.loads(body)


def broken_examples(page: Path, text: str) -> Iterator[str]:
    for match in FENCE.finditer(text):
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        try:
            parse_example(match["language"], body)
        except (SyntaxError, ValueError) as error:
            yield f"{page.relative_to(ROOT)}:{line}: {match['language']} example does not parse: {error}"


def main() -> int:
    """Print every complaint; the exit status is 1 when there is one."""
    front, questions, readme, benchmarks, threads = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/index.md", "docs/questions.md", "README.md", "docs/benchmarks.md", "docs/public-threads.md")
    )
    complaints = [*not_on_the_site(), *unanswered(front, questions), *not_measured(readme, benchmarks)]
    complaints += [*missing_tests(threads), *hidden_names()]
    for page in pages():
        text = page.read_text(encoding="utf-8")
        complaints += [*broken_links(page, text), *broken_examples(page, text)]
    for script in sorted((ROOT / "docs" / "examples").glob("*.py")):
        try:
            compile(script.read_text(encoding="utf-8"), str(script), "exec")
        except SyntaxError as error:
            complaints.append(f"{script.relative_to(ROOT)}: {error}")
    print("\n".join(complaints) or f"docs: {len(pages())} pages, no broken link or example")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
