"""Count what the house promises of itself: sizes of files and packages, import circles, Engine's classes, call chains.

`python tools/house_figures.py` prints one line per figure, and the places behind each that is over its limit. The exit
status is 1 when a limit is passed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SHORT = 30  # lines; below, a file is short
SHORT_SHARE = 0.05
CORE_FILES, CORE_LINES = 100, 10_000
CHAIN = re.compile(r"^\| (?P<what>[^|]+) \| (?P<most>\d+) \| (?P<files>`[^|]+`) \|$", re.MULTILINE)


class Figure(NamedTuple):
    """A number, its limit (None for none), and where it comes from."""

    what: str
    found: float
    limit: float | None
    places: list[str]


def sources(package: Path) -> dict[str, Path]:
    """Return the Python files of a package by module name."""
    root = package / "src"
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: set[str]) -> set[str]:
    """Return the modules among ``known`` that a file imports anywhere, for types too. The packages that it lies in do
    not count: they are there before it."""
    found: set[str] = set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                found.add(inner if inner in known else origin)
    return {name for name in found & known if name != module and not module.startswith(f"{name}.")}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach one another (Tarjan's strongly connected components of two or more)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def own_bases(files: dict[str, Path], module: str, name: str) -> list[str]:
    """Return the classes of the repository that a class stands on, itself first."""
    tree = ast.parse(files[module].read_text(encoding="utf-8"))
    origins = {
        alias.asname or alias.name: ".".join([*module.split(".")[: -node.level or None], node.module or ""])
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [ast.unparse(base) for base in node.bases]
            inner = [(origins.get(base, module), base) for base in bases if "." not in base]
            above = [one for origin, base in inner if origin in files for one in own_bases(files, origin, base)]
            return [f"{module}.{name}", *above]
    return []


def public_lambdas(path: Path) -> Iterator[str]:
    """Yield every attribute without an underscore that is a lambda, to be overwritten by somebody later."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Lambda):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {target.attr}"


def chains() -> Iterator[Figure]:
    """Yield how many files a reader follows for each call chain of docs/concepts.md."""
    for row in CHAIN.finditer((ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")):
        files = re.findall(r"`([^`]+)`", row["files"])
        missing = [name for name in files if not list(ROOT.glob(f"packages/*/src/{name}"))]
        yield Figure(f"files to follow: {row['what']}", len(files), int(row["most"]), [f"no file {m}" for m in missing])


def figures() -> Iterator[Figure]:
    """Yield every figure."""
    everything: list[Path] = []
    lambdas: list[str] = []
    tied: list[str] = []
    for package in sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")):
        files = sources(package)
        lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files.values()}
        core = package.name == "zero-core"
        yield Figure(f"{package.name}: files", len(lines), CORE_FILES if core else None, [])
        yield Figure(f"{package.name}: lines", sum(lines.values()), CORE_LINES if core else None, [])
        everything += files.values()
        lambdas += [place for path in files.values() for place in public_lambdas(path)]
        graph = {module: imports(module, path, set(files)) for module, path in files.items()}
        tied += [" ~ ".join(group) for group in circles(graph)]
        if core:
            engine = own_bases(files, "zero_core.engine", "Engine")
            yield Figure("classes in Engine's chain", len(engine), 1, engine)
    rooms = [path for path in everything if path.name != "__init__.py"]
    short = [path for path in rooms if len(path.read_text(encoding="utf-8").splitlines()) < SHORT]
    places = [str(path.relative_to(ROOT)) for path in short]
    yield Figure(f"share of files under {SHORT} lines", round(len(short) / len(rooms), 3), SHORT_SHARE, places)
    yield Figure("import circles", len(tied), 0, tied)
    yield Figure("public lambda attributes", len(lambdas), 0, lambdas)
    yield from chains()


def main() -> int:
    """Print every figure; return 1 when one is over its limit or names a file that is not there."""
    passed = True
    for figure in figures():
        over = figure.limit is not None and figure.found > figure.limit
        lost = [place for place in figure.places if place.startswith("no file ")]
        limit = "" if figure.limit is None else f" (at most {figure.limit})"
        print(f"{figure.what}: {figure.found}{limit}{'  OVER' if over else ''}")
        for place in figure.places if over else lost:
            print(f"    {place}")
        passed = passed and not over and not lost
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
