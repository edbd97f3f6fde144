"""Check the folders of stores before anything is written into them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["folder_problem"]


def folder_problem(name: str, *, create: bool) -> str | None:
    """Return why stores cannot be in the folder ``name``, as the end of a sentence that begins with a setting's name;
    None if they can. A missing folder is made if ``create`` is true.

    Without ``create`` the reason names the nearest folder that exists: without this check, files meant for a drive that
    is not mounted would fill the disk of its mount point. A folder that cannot be reached has the system's reason: a
    name that is too long, a loop of links, a parent that may not be entered.
    """
    if os.path.isdir(name):
        return None
    path = Path(name)
    nearest = next(parent for parent in path.absolute().parents if os.path.isdir(parent))
    if (reason := _unreachable(name)) is not None:
        return f"cannot use the folder {_shortened(name)}: {reason}; name another"
    if not create:
        return (
            f"there is no folder {name!r}; the nearest that exists is {str(nearest)!r}. "
            'Mount the drive, make the folder, or have it made by "offload": {"create": true}'
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot make the folder {name!r} in {str(nearest)!r}: {error.strerror}"
    return None


def _unreachable(name: str) -> str | None:
    """Return the text of the error with which ``os.stat`` of the folder fails; None if it succeeds or if the folder
    does not exist.
    """
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    return None


def _shortened(name: str) -> str:
    """Return ``name`` in quotes; of one longer than 200 characters only these, followed by its length."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}… ({len(name)} characters)"
