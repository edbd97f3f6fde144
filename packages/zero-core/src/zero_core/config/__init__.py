"""Configuration: DeepSpeed-style JSON, checked to the last key, with the origin of every value.

Names are imported on first use, so that importing this package does not import pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_core.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from zero_core.config.config import Config, ReportRow
    from zero_core.config.precision import autocast_modules, loss_scale, precision_policy

_LAZY = {
    "Config": "config",
    "ReportRow": "config",
    "autocast_modules": "precision",
    "loss_scale": "precision",
    "precision_policy": "precision",
}

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "ReportRow",
    "autocast_modules",
    "loss_scale",
    "precision_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
