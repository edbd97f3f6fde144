"""Read a DeepSpeed-style JSON file, check every key, and report every value in force with its origin.

Names are imported on first use, so that importing this package does not import pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_settings.errors import ConfigError, Problem

if TYPE_CHECKING:
    from zero_settings._optim_keys import SchedulerSection
    from zero_settings._paths import absolute_path
    from zero_settings._prepare import REMOVED_KEYS, SCHEMA_KEY
    from zero_settings._source import read
    from zero_settings._tool_keys import ActivationCheckpointing, FlopsProfiler
    from zero_settings._zero_keys import LeafModule, OffloadOptimizer, OffloadParam, ZeroOptimization
    from zero_settings.auto import resolve_auto
    from zero_settings.config import Config, ReportRow
    from zero_settings.keys import known_keys, value_kinds
    from zero_settings.precision import autocast_modules, input_dtype, loss_scale, precision_policy

_LAZY = {
    "ActivationCheckpointing": "_tool_keys",
    "Config": "config",
    "FlopsProfiler": "_tool_keys",
    "LeafModule": "_zero_keys",
    "OffloadOptimizer": "_zero_keys",
    "OffloadParam": "_zero_keys",
    "REMOVED_KEYS": "_prepare",
    "SCHEMA_KEY": "_prepare",
    "ReportRow": "config",
    "SchedulerSection": "_optim_keys",
    "ZeroOptimization": "_zero_keys",
    "absolute_path": "_paths",
    "autocast_modules": "precision",
    "input_dtype": "precision",
    "known_keys": "keys",
    "loss_scale": "precision",
    "precision_policy": "precision",
    "read": "_source",
    "resolve_auto": "auto",
    "value_kinds": "keys",
}

__all__ = [
    "ActivationCheckpointing",
    "Config",
    "ConfigError",
    "FlopsProfiler",
    "LeafModule",
    "OffloadOptimizer",
    "OffloadParam",
    "Problem",
    "REMOVED_KEYS",
    "ReportRow",
    "SCHEMA_KEY",
    "SchedulerSection",
    "ZeroOptimization",
    "absolute_path",
    "autocast_modules",
    "input_dtype",
    "known_keys",
    "loss_scale",
    "precision_policy",
    "read",
    "resolve_auto",
    "value_kinds",
]


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it, which is imported now. Raises AttributeError for any other
    name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return __all__
