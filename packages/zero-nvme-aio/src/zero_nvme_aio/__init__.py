"""Move bytes between memory and files asynchronously, as fast as the disk goes."""

from __future__ import annotations

from ._engine import Engine
from ._file import File
from ._memory import AlignedBuffer, BufferPool
from ._request import Request
from .errors import AioError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._native import copy_memories, copy_memory
    from ._probe import Probe, probe
    from ._tensors import load, save
    from .extents import Extent, ExtentStore, Generation

__all__ = [
    "AioError",
    "AlignedBuffer",
    "BufferPool",
    "Engine",
    "Extent",
    "ExtentStore",
    "File",
    "Generation",
    "Probe",
    "Request",
    "copy_memories",
    "copy_memory",
    "load",
    "probe",
    "save",
]
__version__ = "0.1.0"

# Imported when first used: they need modules (json, dataclasses) that a bare import should not pay for.
_LAZY = {
    "Extent": "extents",
    "ExtentStore": "extents",
    "Generation": "extents",
    "Probe": "_probe",
    "copy_memories": "_native",
    "copy_memory": "_native",
    "load": "_tensors",
    "probe": "_probe",
    "save": "_tensors",
}


def __getattr__(name: str) -> Any:
    """Return a public name that is imported on first use, and remember it; AttributeError for any other name."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    import importlib

    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, also those not imported yet."""
    return [*__all__, "errors", "testing"]
