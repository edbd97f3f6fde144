"""The level of the packages' messages, which the environment variable ZERO_LOG names: debug, info, warning or error."""

from __future__ import annotations

import logging
import os

from zero_settings.errors import ConfigError, Problem, show

VARIABLE = "ZERO_LOG"
LEVELS = ("debug", "info", "warning", "error")


def log_level() -> int | None:
    """Return the level of `logging` that ZERO_LOG names; None if it is unset or empty. Raises `ConfigError` for another
    word."""
    word = os.environ.get(VARIABLE)
    if not word:
        return None
    if word not in LEVELS:
        raise ConfigError(Problem(VARIABLE, f"expected {', '.join(LEVELS)}", show(word)))
    return int(getattr(logging, word.upper()))


def says_progress() -> bool:
    """Return whether runs print their settings and progress: ZERO_LOG is unset, or names "info" or "debug". Raises
    `ConfigError` for a word that is no level."""
    level = log_level()
    return level is None or level <= logging.INFO


def set_log_levels() -> None:
    """Set the loggers of the zero packages to the level that ZERO_LOG names; leave them if it names none. Raises
    `ConfigError` for a word that is no level."""
    level = log_level()
    if level is not None:
        for name in ("zero_ckpt", "zero_comm", "zero_core", "zero_offload", "zero_partition"):
            logging.getLogger(name).setLevel(level)
