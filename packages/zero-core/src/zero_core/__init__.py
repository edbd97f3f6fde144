"""Train with ZeRO stages 0 to 3 from one DeepSpeed-style JSON file: `initialize` and the `Engine` it returns.

Names are imported on first use, so that importing this package costs little beyond torch. Read `assembly.py` first."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_settings import Config, ConfigError, resolve_auto

    from . import checkpointing
    from .assembly import initialize
    from .construction import (
        Init,
        TiledLinear,
        gathered,
        register_external_parameter,
        set_leaf_modules,
        unregister_external_parameter,
    )
    from .data_loader import RepeatingLoader
    from .engine import Engine
    from .errors import AuditError, UsageError

__version__ = "0.1.0"

__import_ahead__ = ("zero_core.assembly",)
"""Modules without side effects that zero-launch imports ahead of the script in processes that replace lost ranks."""

_LAZY = {
    "AuditError": ".errors",
    "Config": "zero_settings",
    "ConfigError": "zero_settings",
    "Engine": ".engine",
    "Init": ".construction",
    "RepeatingLoader": ".data_loader",
    "TiledLinear": ".construction",
    "UsageError": ".errors",
    "checkpointing": ".",
    "gathered": ".construction",
    "initialize": ".assembly",
    "register_external_parameter": ".construction",
    "resolve_auto": "zero_settings",
    "set_leaf_modules": ".construction",
    "unregister_external_parameter": ".construction",
}

__all__ = [
    "AuditError",
    "Config",
    "ConfigError",
    "Engine",
    "Init",
    "RepeatingLoader",
    "TiledLinear",
    "UsageError",
    "checkpointing",
    "gathered",
    "initialize",
    "register_external_parameter",
    "resolve_auto",
    "set_leaf_modules",
    "unregister_external_parameter",
]


def __getattr__(name: str) -> Any:
    """Return the public object ``name``, imported at its first use and kept. Raises AttributeError for another name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any
    if _LAZY[name] == ".":
        value = import_module(f"{__name__}.{name}")
    else:
        value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
