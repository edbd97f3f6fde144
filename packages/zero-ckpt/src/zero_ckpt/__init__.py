"""Save sharded state atomically; load it at any world size, stage or tier."""

from __future__ import annotations

from .errors import CheckpointError, DamagedError, MismatchError, NotFoundError, NotPlainDataError
from .opening import open_checkpoint
from .reader import Checkpoint, OpenReport, ReadRequest
from .restore import restore
from .save import save_sharded
from .types import Coordinator, Interval, SoloCoordinator

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Coordinator",
    "DamagedError",
    "Interval",
    "MismatchError",
    "NotFoundError",
    "NotPlainDataError",
    "OpenReport",
    "ReadRequest",
    "SoloCoordinator",
    "open_checkpoint",
    "restore",
    "save_sharded",
]
