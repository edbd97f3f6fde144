"""Make paths absolute. Relative paths start at the working directory, which may have been removed."""

from __future__ import annotations

import os

_GONE = "the working directory no longer exists"


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as an absolute, normalised path.

    Raises FileNotFoundError if it is relative and the working directory no longer exists.
    """
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{os.fspath(path)!r} is a relative path, but {_GONE}; change to one that does, or name an absolute path"
        ) from error


def start_of_relative_paths() -> str:
    """Return a clause for an error message that says which directory relative paths start at, or that it no longer
    exists."""
    try:
        return f"the working directory is {os.getcwd()}"
    except FileNotFoundError:
        return _GONE
