"""Compare two pages of docs/reference with the sources, in both directions. Run by `nox -s docs`.

* environment-variables.md: the variables that Python, C++ or CMake sources read. They are found as constants in
  `environ.get("X")`, `environ.pop("X")`, `environ["X"]`, `"X" in environ`, `getenv("X")` and `$ENV{X}`, and as values
  of constants named `…_VARIABLE`. A variable in a table of the page that is not read so has to be a string of some
  source at least: of a tuple that is looped over. So does a variable `ZERO_…` on any other page.
* errors.md: the exception classes of each package, under a heading with the package's name.

Standard library only; the command lines are compared by tools/command_page.py, which needs the packages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
MAPPINGS = re.compile(r"env|environ|.*\.environ")
READS = re.compile(r"environ|\benv\b|_VARIABLE|getenv")
NATIVE_READS = re.compile(r'(?:getenv\("|\$ENV{)(\w+)')
OURS = re.compile(r"\bZERO_[A-Z0-9_]+\b")
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)*")
CLASS = re.compile(r"^class ([A-Za-z]\w*Error)\(", re.MULTILINE)
CELL = re.compile(r"^\| (.+?) \|", re.MULTILINE)
NAME = re.compile(r"`([^`]+)`")


@cache
def sources() -> dict[Path, str]:
    """Return the text of the packages' Python sources and of this repository's sessions."""
    files = [*ROOT.glob("packages/*/src/**/*.py"), ROOT / "noxfile.py", *ROOT.glob("tools/*.py")]
    own = Path(__file__).resolve()
    return {file: file.read_text(encoding="utf-8") for file in sorted(files) if file != own}


def pages() -> list[Path]:
    """Return the pages of the site and the front page."""
    return [ROOT / "README.md", *sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])]


def constant(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
        yield node.value


def is_environment(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and MAPPINGS.fullmatch(ast.unparse(node)) is not None


def variables_read(tree: ast.AST) -> Iterator[str]:
    """Yield the environment variables that a module reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            if ast.unparse(node.func) in {"getenv", "os.getenv"} or (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in {"get", "pop"}
                and is_environment(node.func.value)
            ):
                yield from constant(node.args[0])
        elif isinstance(node, ast.Subscript):
            if isinstance(node.ctx, ast.Load) and is_environment(node.value):
                yield from constant(node.slice)
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            yield from constant(node.left)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_VARIABLE"):
            yield from constant(node.value)


@cache
def variables_in_sources() -> dict[str, str]:
    """Return every variable that is read, with a file that reads it."""
    found: dict[str, str] = {}
    for path, text in sources().items():
        for name in variables_read(ast.parse(text)) if READS.search(text) else ():
            found.setdefault(name, str(path.relative_to(ROOT)))
    for path in sorted([*ROOT.glob("packages/*/csrc/**/*.cpp"), *ROOT.glob("packages/*/CMakeLists.txt")]):
        for name in NATIVE_READS.findall(path.read_text(encoding="utf-8")):
            found.setdefault(name, str(path.relative_to(ROOT)))
    return found


def variable_complaints() -> Iterator[str]:
    page = PAGES / "environment-variables.md"
    text = page.read_text(encoding="utf-8")
    shown = {name for name in NAME.findall(text) if VARIABLE.fullmatch(name)}
    read = variables_in_sources()
    for name in sorted(set(read) - shown):
        yield f"docs/reference/{page.name} does not list {name}, which {read[name]} reads"
    rows = "".join(line for line in text.splitlines() if line.startswith("|"))
    for name in sorted(set(filter(VARIABLE.fullmatch, NAME.findall(rows))) - set(read)):
        if not any(f'"{name}"' in source for source in sources().values()):
            yield f"docs/reference/{page.name} lists {name}, which no source reads"
    for other in pages():
        for name in sorted(set(OURS.findall(other.read_text(encoding="utf-8"))) - set(read)):
            if not any(f'"{name}"' in source for source in sources().values()):
                yield f"{other.relative_to(ROOT)} names {name}, which no source reads"


@cache
def errors_in_sources() -> dict[tuple[str, str], str]:
    """Return (package, class) of every exception that a package defines, with its file."""
    return {
        (path.relative_to(ROOT).parts[1], name): str(path.relative_to(ROOT))
        for path, text in sources().items()
        for name in CLASS.findall(text)
        if path.is_relative_to(ROOT / "packages")
    }


def errors_on_page(text: str) -> set[tuple[str, str]]:
    """Return (package, class) of every row, by the heading above it."""
    found: set[tuple[str, str]] = set()
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        package = part.splitlines()[0].strip()
        found |= {(package, name) for cell in CELL.findall(part) for name in NAME.findall(cell)}
    return found


def error_complaints() -> Iterator[str]:
    page = PAGES / "errors.md"
    shown, defined = errors_on_page(page.read_text(encoding="utf-8")), errors_in_sources()
    for package, name in sorted(set(defined) - shown):
        yield f"docs/reference/{page.name} does not list {name} under {package}; {defined[package, name]} defines it"
    for package, name in sorted(shown - set(defined)):
        yield f"docs/reference/{page.name} lists {name} under {package}, which does not define it"


def main() -> int:
    """Print every complaint; the exit status is 1 when there is one."""
    complaints = [*variable_complaints(), *error_complaints()]
    counts = f"{len(variables_in_sources())} environment variables, {len(errors_in_sources())} errors"
    print("\n".join(complaints) or f"reference: {counts}, as in the sources")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
