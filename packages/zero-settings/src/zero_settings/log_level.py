"""How much the packages say: the environment variable ZERO_LOG."""

from __future__ import annotations

import logging
import os

from zero_settings.errors import ConfigError, Problem, show

VARIABLE = "ZERO_LOG"
LEVELS = ("debug", "info", "warning", "error")


def log_level() -> int | None:
    """Return the level of `logging` that the environment variable ZERO_LOG names, None where it is unset or empty.
    Raises `ConfigError` for a word that is not in `LEVELS`.
    """
    word = os.environ.get(VARIABLE)
    if not word:
        return None
    if word not in LEVELS:
        raise ConfigError(Problem(VARIABLE, f"expected {', '.join(LEVELS)}", show(word)))
    return int(getattr(logging, word.upper()))


def says_progress() -> bool:
    """Return whether ZERO_LOG lets a run say what it is and how far it is. Raises `ConfigError` as `log_level`."""
    level = log_level()
    return level is None or level <= logging.INFO


def set_log_levels() -> None:
    """Give the loggers of all zero packages the level that ZERO_LOG names, if it names one. Raises `ConfigError` as
    `log_level`."""
    level = log_level()
    if level is not None:
        for name in ("zero_ckpt", "zero_comm", "zero_core", "zero_offload", "zero_partition"):
            logging.getLogger(name).setLevel(level)
