"""Configuration: DeepSpeed-style JSON, checked to the last key, with the origin of every value.

Names are imported on first use, so that importing this package does not import pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_core.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from zero_core.config._prepare import REMOVED_KEYS
    from zero_core.config._source import read
    from zero_core.config._zero_keys import OffloadOptimizer, OffloadParam, ZeroOptimization
    from zero_core.config.config import Config, ReportRow
    from zero_core.config.keys import known_keys
    from zero_core.config.precision import autocast_modules, loss_scale, precision_policy

_LAZY = {
    "Config": "config",
    "OffloadOptimizer": "_zero_keys",
    "OffloadParam": "_zero_keys",
    "REMOVED_KEYS": "_prepare",
    "ReportRow": "config",
    "ZeroOptimization": "_zero_keys",
    "autocast_modules": "precision",
    "known_keys": "keys",
    "loss_scale": "precision",
    "precision_policy": "precision",
    "read": "_source",
}

__all__ = [
    "Config",
    "ConfigError",
    "OffloadOptimizer",
    "OffloadParam",
    "Problem",
    "REMOVED_KEYS",
    "ReportRow",
    "ZeroOptimization",
    "autocast_modules",
    "known_keys",
    "loss_scale",
    "precision_policy",
    "read",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
