"""Checks before a conversion begins: its input is complete, and it replaces only files of its own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from ..commit import has_mark, is_data_file
from ..durable import fsync_directory, rename_new
from ..errors import CheckpointError


def require_torch(what: str) -> None:
    """Raise CheckpointError, saying that `what` needs torch, when torch is not installed."""
    if find_spec("torch") is None:
        raise CheckpointError(
            f"{what} needs torch: pip install zero-ckpt[torch]; without it checkpoints of zero-ckpt and safetensors "
            "are read, and safetensors written (zero_to_fp32.py: --safe_serialization)"
        )


def require_folder(path: Path) -> None:
    """Raise CheckpointError when `path` or one of its parents is there and is no folder."""
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise CheckpointError(
            f"{nearest} is no folder, and {path} has to be one; name another target, or one that ends in "
            ".safetensors, .bin, .pt or .pth to write a model into one file"
        )


def refuse_folder(path: Path) -> None:
    """Raise CheckpointError when `path` is a folder; only files are overwritten by a file."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder and is not overwritten by a file; name another target")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError when there is anything at `path`, unless `overwrite`; a data file of a checkpoint is
    refused even then."""
    if is_data_file(path.name) and has_mark(path.parent):
        raise CheckpointError(f"{path} is a file of the checkpoint {path.parent}; name another target")
    if os.path.lexists(path) and not overwrite:
        raise _exists_error(path)


def refuse_other(path: Path, contents: bytes, overwrite: bool) -> None:
    """Raise CheckpointError as `refuse_existing` does, unless the file at `path` has these `contents` already."""
    if not (path.is_file() and path.stat().st_size == len(contents) and path.read_bytes() == contents):
        refuse_existing(path, overwrite)


def move_into_place(finished: Path, path: Path, overwrite: bool) -> None:
    """Rename a finished file to `path`; the name is on disk on return. Raises CheckpointError, with nothing changed,
    when there is anything at `path`, unless `overwrite`."""
    try:
        if overwrite:
            finished.replace(path)
        else:
            rename_new(finished, path)
    except FileExistsError as error:
        raise _exists_error(path) from error
    fsync_directory(path.parent)


def _exists_error(path: Path) -> CheckpointError:
    """Return the error that says that there is something at `path` already."""
    return CheckpointError(
        f"{path} exists and is not overwritten; name another target, or pass overwrite=True (--overwrite)"
    )
