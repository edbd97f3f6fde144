"""Relative paths start at the working directory, which may be gone."""

from __future__ import annotations

from pathlib import Path

from .errors import CheckpointError

_GONE = "the working directory no longer exists"


def absolute(path: Path) -> Path:
    """Return ``path`` as an absolute path. Raises CheckpointError if the working directory that it starts at is
    gone."""
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: {_GONE}; change to one that does, or name an absolute path") from error


def start_of(path: Path) -> str:
    """Return the end of an error about ``path``, which was not found: the working directory that it starts at; empty if
    it is absolute."""
    if path.is_absolute():
        return ""
    try:
        return f"; the working directory is {Path.cwd()}"
    except FileNotFoundError:
        return f"; {_GONE}"
