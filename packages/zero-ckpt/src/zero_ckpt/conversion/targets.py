"""What a conversion may put in its place, and what it must leave alone."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError when `path` is taken and may not be overwritten."""
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(
            f"{path} exists and is not overwritten; name another target, or pass overwrite=True (--overwrite)"
        )
