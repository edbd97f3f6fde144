"""Checks before a conversion begins: its input is complete, and it replaces only files of its own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from ..commit import has_mark, is_data_file
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
    """Raise CheckpointError when there is anything at `path`, unless `overwrite`. A data file of a checkpoint is
    refused in any case."""
    if is_data_file(path.name) and has_mark(path.parent):
        raise CheckpointError(f"{path} is a file of the checkpoint {path.parent}; name another target")
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(
            f"{path} exists and is not overwritten; name another target, or pass overwrite=True (--overwrite)"
        )
