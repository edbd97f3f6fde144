"""Packages that answer to another package's name in the ranks: the options `--as-NAME`.

Such a package registers a function by the entry point group `zero_launch.as`, under the name that it answers to. The
function takes nothing and returns a folder for each search path (``PYTHONPATH``, ``PATH``) that ranks look in first.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence

GROUP = "zero_launch.as"


def registered() -> list[str]:
    """Return the names that installed packages answer to, sorted."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def search_paths(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the search paths of ranks in which ``names`` are answered: variable -> what ``environ`` says, with the
    folders of the stand-ins in front. Raises ValueError for a name that no installed package answers to."""
    paths: dict[str, str] = {}
    for name in names:
        entries = importlib.metadata.entry_points(group=GROUP, name=name)
        if not entries:
            raise ValueError(not_registered(name))
        folders: Mapping[str, os.PathLike[str]] = next(iter(entries)).load()()
        for variable, folder in folders.items():
            paths[variable] = _first_on(paths.get(variable, environ.get(variable, "")), os.fspath(folder))
    return paths


def not_registered(name: str) -> str:
    """Return what to say of ``--as-{name}`` when no installed package answers to it."""
    known = ", ".join(f"--as-{other}" for other in registered()) or "none"
    return f"--as-{name}: no installed package answers to {name!r} (available: {known}); install the one that does"


def _first_on(search_path: str, folder: str) -> str:
    return os.pathsep.join([folder, *(part for part in search_path.split(os.pathsep) if part and part != folder)])
