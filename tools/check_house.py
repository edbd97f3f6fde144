"""Rules of the house that ruff, mypy and import-linter do not know. Run by `nox -s lint`.

* `__all__` of every package is sorted and names exactly what the package offers.
* At most one file of zero-offload and of zero-ckpt imports zero-nvme-aio (the `nvme` extra).
* No product file swallows every exception without a word, carries a to-do, names a machine's own folder or a
  registry's host.
* What a version of torch lacks is handled in a package's one `compat.py`: each of its names says for which version, in
  its docstring, and chooses by the version's number. No other file asks for torch's version to choose by it.
* No class name stands in two packages, or twice in one, unless all but one of its docstrings say what it is "Named as".
* `ruff format` changes nothing.
* The workflows name every foreign action by its commit, and a release downloads its own package's artifacts alone.
* Every package has its README, CHANGELOG and LICENSE, a static version, and its siblings pinned to its own series.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
TEXT = {".cfg", ".cpp", ".h", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", ""}
PASS = re.compile(r"(?:^\s+|:\s*)pass\b", re.MULTILINE)
# Written in pieces where this file would otherwise find itself.
FORBIDDEN = {
    "a machine's own folder": re.compile(
        r"(?<![\w.])/(?:root|work/main|work/shared|opt/" + r"pypi|opt/" + r"wheels)\b"
    ),
    "a home folder": re.compile(r"(?<![\w.])/(?:home|Users)/(?!you\b|user\b)\w+"),
    "a registry's host": re.compile(r"py" + r"pi\.(?:org|python)|python" + r"hosted\.org|registry\." + r"npmjs"),
    "a to-do": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
    "a merge conflict": re.compile(r"^(?:<{7} |>{7} )", re.MULTILINE),
}

WORKFLOWS = ROOT / ".github" / "workflows"
ACTION = re.compile(r"\buses: (?!\./)(\S+)")
ARTIFACT = re.compile(r"uses: actions/upload-artifact@.*\n +with:\n +name: (dist-.*)")
DOWNLOADED = re.compile(r"uses: actions/download-artifact@.*\n +with:\n +pattern: (.*)")
EXPRESSION = re.compile(r"\$\{\{ (?:matrix|needs\.check\.outputs)\.(\w+) \}\}")

TORCH_VERSION = re.compile(r"torch\s+(?:before\s+)?2\.\d+")


def import_name(package: Path) -> str:
    return package.name.replace("-", "_")


def exported(package: Path) -> Iterator[str]:
    """Complaints about the export list of a package, which is imported for it."""
    name = import_name(package)
    try:
        module = importlib.import_module(name)
        missing = [item for item in getattr(module, "__all__", ()) if not hasattr(module, item)]
    except ImportError as error:  # of the package, or of what it imports on first use
        yield f"{package.name}: cannot import {name}: {error}"
        return
    listed = getattr(module, "__all__", None)
    if listed is None:
        yield f"{package.name}: {name}/__init__.py has no __all__"
        return
    if list(listed) != sorted(set(listed)):
        yield f"{package.name}: __all__ is not sorted() or has duplicates: {listed}"
    if missing:
        yield f"{package.name}: __all__ names what {name} does not have: {', '.join(missing)}"
    for item in sorted(own_names(package) - set(listed)):
        yield f"{package.name}: {name}.{item} looks public but is not in __all__"


def own_names(package: Path) -> set[str]:
    """The names without an underscore that `__init__.py` defines, or imports from the package's own modules."""
    name = import_name(package)
    found: set[str] = set()
    for node in ast.parse((package / "src" / name / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).split(".")[0] == name):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return {item for item in found if not item.startswith("_") and item != "TYPE_CHECKING"}


def nvme_importers(package: Path) -> list[Path]:
    found = []
    for path in sorted((package / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "zero_nvme_aio" for name in names):
                found.append(path)
                break
    return found


def one_door_to_nvme(package: Path) -> Iterator[str]:
    files = nvme_importers(package)
    if len(files) > 1:
        names = ", ".join(str(path.relative_to(ROOT)) for path in files)
        yield f"{package.name}: zero_nvme_aio is imported by {len(files)} files, one is allowed: {names}"


def silent_handlers(path: Path, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ExceptHandler) or not all(isinstance(line, ast.Pass) for line in node.body):
            continue
        broad = node.type is None or (
            isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
        )
        if broad:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: swallows every exception without a word"


def written_down(path: Path) -> Iterator[str]:
    """Complaints about the text of one tracked file."""
    if path.suffix not in TEXT or path.name == "LICENSE" or "third_party" in path.parts or not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    for what, pattern in FORBIDDEN.items():
        for match in pattern.finditer(text):
            yield f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match.group()!r}"
    if path.suffix == ".py" and "except" in text and PASS.search(text):  # parsing all takes its time
        yield from silent_handlers(path, text)


def compatibility(package: Path) -> Iterator[str]:
    """Complaints about how a package's sources deal with versions of torch."""
    files = sorted((package / "src").rglob("*.py"))
    compats = [path for path in files if path.name == "compat.py"]
    if len(compats) > 1:
        yield f"{package.name}: {len(compats)} files are named compat.py, one is allowed"
    for path in files:
        text = path.read_text(encoding="utf-8")
        if path.name == "compat.py":
            yield from nameless_versions(path, ast.parse(text))
        elif "torch.__version__" in text:
            yield from compared_versions(path, ast.parse(text))


def nameless_versions(path: Path, tree: ast.Module) -> Iterator[str]:
    """Complaints about a `compat.py`: names that say no version, and choices that are not by the version's number."""
    documented: list[tuple[str, int, str]] = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            documented.append((node.name, node.lineno, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            words = after.value if isinstance(after, ast.Expr) else None
            documented.append((name, node.lineno, str(words.value) if isinstance(words, ast.Constant) else ""))
    for name, line, text in documented:
        if not TORCH_VERSION.search(text):
            yield f"{path.relative_to(ROOT)}:{line}: {name} has no 'torch 2.N' in its docstring"
    for node in ast.walk(tree):
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) in {"hasattr", "getattr"}
        if asks or isinstance(node, ast.Try):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: choose by TORCH, the version, not by what an attempt gives"


def compared_versions(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and "torch.__version__" in ast.unparse(node):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: a choice by torch's version belongs into compat.py"


def namesakes() -> Iterator[str]:
    """Complaints about classes of one name: one bears it for good, the docstring of each other says "Named as …"."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for package in PACKAGES:
        for path in sorted((package / "src").rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "class " in text else ():
                if isinstance(node, ast.ClassDef):
                    reason = "Named as " in (ast.get_docstring(node) or "")
                    found.setdefault(node.name, []).append((f"{path.relative_to(ROOT)}:{node.lineno}", reason))
    for name, classes in sorted(found.items()):
        without = [place for place, reason in classes if not reason]
        if len(classes) > 1 and len(without) > 1:
            yield f"class {name} stands in {', '.join(without)}: rename, or say in its docstring what it is named as"


def unformatted() -> Iterator[str]:
    """Complaints about files that `ruff format` would change."""
    command = [sys.executable, "-m", "ruff", "format", "--check", "--output-format", "concise", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield from (line for line in (done.stdout + done.stderr).splitlines() if "reformatted" in line)
        yield "run `ruff format` in the root of the repository"


def metadata(package: Path) -> Iterator[str]:
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        if not (package / name).is_file():
            yield f"{package.name}: {name} is missing"
    text = (package / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "\d+\.\d+\.\d+(?:\.post\d+)?"$', text, re.MULTILINE)
    if version is None:
        yield f"{package.name}: pyproject.toml has no static version"
    for sibling, pin in re.findall(r'"(zero-[a-z-]+)(?:\[\w+\])?([^"]*)"', text):
        if (
            (ROOT / "packages" / sibling).is_dir()
            and sibling != package.name
            and not re.fullmatch(r"~=\d+\.\d+\.0", pin)
        ):
            yield f"{package.name}: {sibling} is pinned {pin!r}, expected ~=0.N.0"


def actions() -> Iterator[str]:
    """Complaints about actions of others that a branch or a tag names, which their authors can move."""
    for path in sorted(WORKFLOWS.glob("*.yml")):
        for action in ACTION.findall(path.read_text(encoding="utf-8")):
            if re.fullmatch(r".+@[0-9a-f]{40}", action) is None:
                yield f"{path.relative_to(ROOT)}: {action} is not named by a commit"


def artifacts() -> Iterator[str]:
    """Complaints about what a release of each package downloads of what the workflow of the wheels makes."""
    made = ARTIFACT.findall((WORKFLOWS / "wheels.yml").read_text(encoding="utf-8"))
    patterns = DOWNLOADED.findall((WORKFLOWS / "release.yml").read_text(encoding="utf-8"))
    if not made or len(patterns) != 1:
        yield f"release.yml downloads {patterns} of wheels.yml's {made}: expected one pattern, and artifacts"
        return
    for package in PACKAGES:
        pattern = filled(patterns[0], package)
        for owner in PACKAGES:
            for name in (filled(name, owner) for name in made):
                if fnmatch.fnmatchcase(name, pattern) != (owner == package):
                    yield f"a release of {package.name} downloads {pattern!r}, and {name!r} is of {owner.name}"


def filled(text: str, package: Path) -> str:
    """A name or pattern of a workflow for a package, on a machine."""
    return EXPRESSION.sub(lambda match: {"package": package.name, "machine": "ubuntu-24.04-arm"}[match[1]], text)


def tracked() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name]


def main() -> int:
    """Print every complaint; the exit status is 1 when there is one."""
    complaints = [line for package in PACKAGES for check in (exported, metadata) for line in check(package)]
    for package in PACKAGES:
        if package.name in {"zero-offload", "zero-ckpt"}:
            complaints += one_door_to_nvme(package)
    complaints += [line for path in tracked() for line in written_down(path)]
    complaints += [line for package in PACKAGES for line in compatibility(package)]
    complaints += [*namesakes(), *actions(), *artifacts()]
    complaints += unformatted()
    print("\n".join(complaints) or f"house rules: {len(PACKAGES)} packages, no complaint")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
