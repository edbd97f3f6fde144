"""Packages that are imported in the ranks under another package's name: the options `--as-NAME`.

Such a package registers a function in the entry point group `zero_launch.as`, under the other package's name. The
function has no arguments and returns a folder for each search path: ``{"PYTHONPATH": folder, "PATH": folder}``. The
ranks search these folders first.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence

GROUP = "zero_launch.as"


def registered_names() -> list[str]:
    """Return the names NAME for which an installed package serves `--as-NAME`, sorted."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})


def search_paths(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the search paths for ranks with `--as-NAME` for each of ``names``: variable (PYTHONPATH, PATH) -> the
    packages' folders, the last name's first, then the entries of that variable in ``environ``. Empty without names.

    Raises ValueError for a name that no installed package serves.
    """
    paths: dict[str, str] = {}
    for name in names:
        entries = importlib.metadata.entry_points(group=GROUP, name=name)
        if not entries:
            raise ValueError(not_registered_error(name))
        folders: Mapping[str, os.PathLike[str]] = next(iter(entries)).load()()
        for variable, folder in folders.items():
            paths[variable] = _prepend(os.fspath(folder), paths.get(variable, environ.get(variable, "")))
    return paths


def not_registered_error(name: str) -> str:
    """Return the error message for ``--as-{name}`` if no installed package serves it."""
    known = ", ".join(f"--as-{other}" for other in registered_names()) or "none"
    return f"--as-{name}: no installed package answers to {name!r} (available: {known}); install the one that does"


def _prepend(folder: str, search_path: str) -> str:
    """Return ``search_path`` with ``folder`` in front, without empty entries and without ``folder`` further behind."""
    return os.pathsep.join([folder, *(part for part in search_path.split(os.pathsep) if part and part != folder)])
