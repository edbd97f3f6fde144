"""Check that every public name has a complete docstring. Run by `nox -s lint`; imports none of the packages.

Public are the names in `__all__` of each package, and the methods and properties of public classes. A docstring is
complete when its first paragraph ends as a sentence does, and says what a call does or what a thing is: it does not
open with "What", "Who", "Whoever" or "Whether". A constant has a string below it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPENING = re.compile(r"(What|Who|Whoever|Whether)\b")
ENDS = (".", ":", "?")
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Definition:
    """The statement or module that defines a public name, its file, and the string below it."""

    path: Path
    node: ast.AST
    below: str = ""

    def docstring(self) -> str:
        """Return the docstring; of a constant the string below it."""
        node = self.node
        return (ast.get_docstring(node) or "") if isinstance(node, Defined | ast.Module) else self.below

    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(self.node, 'lineno', 1)}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def module_file(module: str) -> Path | None:
    """Return the file of a package's module, its stub if it is native; None for a module from elsewhere."""
    path = ROOT.joinpath("packages", module.split(".")[0].replace("_", "-"), "src", *module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"), path.with_suffix(".pyi"))
    return next((file for file in files if file.is_file()), None)


def statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements of a body and of the conditions in it, each with the string below it."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        yield node, text if isinstance(text, str) else ""
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])


def definition(module: str, name: str) -> Definition | None:
    """Return where a module's name is defined, through the modules that pass it on; None if that is elsewhere."""
    path = module_file(module)
    if path is None:
        return None
    for node, below in statements(tree(path).body):
        if isinstance(node, Defined) and node.name == name and "overload" not in marks(node):
            return Definition(path, node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in targets(node):
            return Definition(path, node, below)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return imported(absolute(module, path, node), alias.name, asked_by=module)
    return None


def imported(source: str, name: str, *, asked_by: str) -> Definition | None:
    """Return the definition of what `from source import name` brings: a name of the source, or a module below it."""
    below = module_file(f"{source}.{name}")
    found = definition(source, name) if source != asked_by else None
    return found or (Definition(below, tree(below)) if below else None)


def targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names that an assignment sets."""
    return [ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def absolute(module: str, path: Path, node: ast.ImportFrom) -> str:
    """Return the full name of the module that an import takes from."""
    if not node.level:
        return str(node.module)
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def exported(module: str) -> list[str]:
    """Return the names in `__all__` of a package."""
    path = module_file(module)
    nodes = tree(path).body if path else []
    lists = [node.value for node in nodes if isinstance(node, ast.Assign) and "__all__" in targets(node)]
    return [name for value in lists for name in ast.literal_eval(value)]


def public(module: str) -> Iterator[tuple[str, Definition]]:
    """Yield every public name of a package, and the methods and properties of its classes, with their definitions."""
    for name in exported(module):
        found = definition(module, name)
        if found is None:
            continue  # of another project: its docstrings are not ours
        yield f"{module}.{name}", found
        if isinstance(found.node, ast.ClassDef):
            for node in found.node.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_shown(node):
                    yield f"{module}.{name}.{node.name}", Definition(found.path, node)


def is_shown(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether readers see a method: it has no underscore, and is no overload and no property's setter."""
    return not node.name.startswith("_") and not marks(node) & {"overload", "setter", "deleter"}


def marks(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Return the last words of the decorators."""
    return {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}


def complaints(module: str) -> Iterator[str]:
    for name, found in public(module):
        text = found.docstring()
        first = text.split("\n\n")[0].strip()
        if not text:
            yield f"{found.place()}: {name} is public and has no docstring"
        elif OPENING.match(text):
            yield f"{found.place()}: {name}: say what the call does or the thing is; not {first.split()[0]!r}"
        elif not first.endswith(ENDS):
            yield f"{found.place()}: {name}: the first paragraph of the docstring does not end its sentence"


def main() -> int:
    """Print every complaint; the exit status is 1 when there is one."""
    modules = [path.parent.name.replace("-", "_") for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    found = [line for module in modules for line in complaints(module)]
    print("\n".join(found) or f"docstrings: the public names of {len(modules)} packages have theirs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
