"""The private names of torch that are used: docs/torch-names.md lists them all, and the installed torch has them.

A name is private when a part of it begins with an underscore. Found in the sources are imports from private modules of
torch, attributes that begin with an underscore and that the package does not define itself, private attributes of
modules and tensors, and what subclasses of the classes in `BASES` override or read. Run by `nox -s lint` and by every
`nox -s "torch(…)"`. The exit status is 1 when the page, the sources and torch do not agree.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "torch-names.md"
BASES = {
    "Adam": "torch.optim.adam",
    "DynamicRendezvousHandler": "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "LocalElasticAgent": "torch.distributed.elastic.agent.server.local_elastic_agent",
    "SubprocessContext": "torch.distributed.elastic.multiprocessing.api",
}
NOT_TORCHS = {
    "_asdict",
    "_current_exceptions",
    "_current_frames",
    "_exit",
    "_getframe",
    "_replace",
    "_SubParsersAction",
}
"""Names that begin with an underscore and that Python's own library makes public."""
NOT_TORCHS |= {
    "_z3_leaf",
    "_attn_implementation",
    "_is_stateful",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
}
"""And those of DeepSpeed and of transformers."""
NOT_TORCHS |= {"_register_atexit"}
"""And one of `threading`, which `concurrent.futures` itself uses; where it is gone the code does without."""
NAMESPACES = {"_C", "_autograd"}
"""Parts of torch whose names are listed instead."""
VERSION = re.compile(r"2\.\d+( or before)?")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def of_base(name: str) -> frozenset[str]:
    """Private names of a class of torch: its methods, and what its file and its bases' files set on `self`."""
    module = importlib.import_module(BASES[name])
    kinds = [kind for kind in getattr(module, name).__mro__ if kind.__module__.startswith("torch.")]
    sources = [inspect.getsource(sys.modules[kind.__module__]) for kind in kinds]
    found = {word for source in sources for word in re.findall(r"self\.(_\w+)", source)}
    return frozenset(filter(private, {*found, *dir(kinds[0])}))


@functools.cache
def of_objects() -> frozenset[str]:
    """Private names of any module and any tensor."""
    import torch

    return frozenset(
        filter(private, {*dir(torch.nn.Module()), *dir(torch.nn.Parameter()), *dir(torch.UntypedStorage())})
    )


def defined(trees: list[ast.Module]) -> set[str]:
    """Every name that a package's sources define or set on an object of their own."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def used_in(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of torch that a file uses, by their last part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("torch"):
            parts = [part for part in str(node.module).split(".") if private(part)]
            yield from (alias.name for alias in node.names if parts or private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "hasattr"}:
            words = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            yield from (word for word in words if private(word) and word not in own | NOT_TORCHS)
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in NOT_TORCHS | NAMESPACES:
            from_torch = ast.unparse(node).startswith("torch.")
            if from_torch or node.attr not in own or (node.attr in of_objects() and not is_self(node.value)):
                yield node.attr
        elif isinstance(node, ast.ClassDef):
            yield from overridden(node)


def overridden(node: ast.ClassDef) -> Iterator[str]:
    for base in {ast.unparse(base) for base in node.bases} & set(BASES):
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef) and inner.name in of_base(base):
                yield inner.name
            elif isinstance(inner, ast.Attribute) and inner.attr in of_base(base) and is_self(inner.value):
                yield inner.attr


def in_sources() -> dict[str, set[str]]:
    """Name -> the files that use it."""
    found: dict[str, set[str]] = {}
    for package in sorted(ROOT.glob("packages/*/src")):
        trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
        own = defined(list(trees.values()))
        for path, tree in trees.items():
            for name in used_in(tree, own):
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def on_page() -> dict[str, tuple[str, str]]:
    """Full name -> since which version, and which test or file; from the rows of the page's tables."""
    rows = [
        line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `torch." in line
    ]
    found: dict[str, tuple[str, str]] = {}
    for cells in rows:
        names = re.findall(r"`([^`]+)`", cells[0])
        for name in (name for name in names if any(map(private, name.split(".")))):
            found[name] = (cells[1].strip(), cells[-1].strip())
    return found


def resolve(name: str) -> Any:
    """The object of that name, importing as much of it as is a module. Raises AttributeError or ImportError."""
    found: Any = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        missing = inspect.ismodule(found) and not hasattr(found, part)
        found = importlib.import_module(path) if missing else getattr(found, part)
    return found


def there(name: str) -> bool:
    """Return whether the installed torch has a name; attributes that only objects have are looked for in the source."""
    kind, _, attribute = name.rpartition(".")
    owner = kind.rpartition(".")[2]
    if owner in BASES:
        return attribute in of_base(owner)
    if kind in {"torch.nn.Module", "torch.Tensor"}:
        return attribute in of_objects()
    try:
        resolve(name)
    except (AttributeError, ImportError):
        return False
    return True


def main() -> int:
    """Compare the page with the sources and with the installed torch; print what differs."""
    import torch

    release = tuple(map(int, torch.__version__.split(".")[:2]))
    page, sources = on_page(), in_sources()
    last = {name.rpartition(".")[2] for name in page}
    complaints = [
        f"{PAGE.name} does not list {name}, a private name of torch in {', '.join(sorted(files))}"
        for name, files in sorted(sources.items())
        if name not in last
    ]
    complaints += [f"{PAGE.name} lists {n}, which no source uses" for n in page if n.rpartition(".")[2] not in sources]
    for name, (since, test) in page.items():
        match = VERSION.match(since)
        if match is None:
            complaints.append(f"{PAGE.name}: {name} says {since!r}, expected the version of torch that brought it")
        elif release >= tuple(map(int, since.split()[0].split("."))) and not there(name):
            complaints.append(f"torch {torch.__version__} has no {name}; {PAGE.name} says: {since}")
        for path in re.findall(r"`((?:packages|tests-integration)/[^`]+)`", test):
            if not (ROOT / path).is_file():
                complaints.append(f"{PAGE.name}: {name} names a test that is not there: {path}")
    print("\n".join(complaints) or f"{len(page)} private names of torch, all of them in torch {torch.__version__}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
