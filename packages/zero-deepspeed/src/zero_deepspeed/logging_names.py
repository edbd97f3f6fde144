"""`deepspeed.utils.logging`: the logger `DeepSpeed`, which this package logs to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch.distributed as dist

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the ranks in ``ranks`` (None, empty, or with -1 in it: all), behind the number of the rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Call `log_dist`, only once in this process for the same arguments."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    """Call `log_dist`, only once in this process for the same arguments."""
    log_dist(message, ranks, level)


@cache
def warning_once(message: str) -> None:
    """Log a warning, only once in this process for the same message."""
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set a logger's level by name (debug, info, warning, error, critical), in any case. Raises ValueError for another
    name.

    ``custom_logger``: default the logger `DeepSpeed`.
    """
    (custom_logger if custom_logger is not None else logger).setLevel(log_level_str.upper())
