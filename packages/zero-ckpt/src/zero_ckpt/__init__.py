"""Save sharded state atomically; load it at any world size, stage or tier."""

from __future__ import annotations

from .any_format import open_any, restore_any
from .async_saver import AsyncSaver
from .conversion import convert
from .errors import CheckpointError, DamagedError, MismatchError, NotFoundError, NotPlainDataError, ReplacedError
from .facade import load, save
from .inspecting import inspect
from .manifest import Manifest, TensorEntry
from .opening import open_checkpoint
from .reader import Checkpoint, OpenReport, ReadRequest
from .report import LoadReport
from .restoring import restore
from .saving import save_sharded
from .types import Coordinator, FileExtent, Interval, SoloCoordinator
from .verifying import VerifyReport, verify

__version__ = "0.1.0"
__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointError",
    "Coordinator",
    "DamagedError",
    "FileExtent",
    "Interval",
    "LoadReport",
    "Manifest",
    "MismatchError",
    "NotFoundError",
    "NotPlainDataError",
    "OpenReport",
    "ReadRequest",
    "ReplacedError",
    "SoloCoordinator",
    "TensorEntry",
    "VerifyReport",
    "convert",
    "inspect",
    "load",
    "open_any",
    "open_checkpoint",
    "restore",
    "restore_any",
    "save",
    "save_sharded",
    "verify",
]
