"""Translation of the `aio` section of a DeepSpeed configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_KEYS = (
    "block_size",
    "intra_op_parallelism",
    "overlap_events",
    "queue_depth",
    "single_submit",
    "thread_count",
    "use_gds",
)


def engine_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `Engine` that have the meaning of ``config``, the `aio` section of a DeepSpeed
    configuration; absent keys get DeepSpeed's defaults.

    Raises ValueError for an unknown key, `use_gds`, two different thread counts, and flags that are not `bool`. Numbers
    are left for `Engine` to check.
    """
    for key in config:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(_KEYS)}"
            raise ValueError(f"aio.{key} is not a key{hint}")
    if config.get("use_gds"):
        raise ValueError("aio.use_gds is served by zero_nvme_aio.gds.GdsEngine, not by this engine; leave the key out")
    threads = config.get("intra_op_parallelism", config.get("thread_count", 1))
    if config.get("thread_count", threads) != threads:
        raise ValueError(
            f"aio.intra_op_parallelism is {threads} but aio.thread_count is {config['thread_count']}; "
            "both name the same thing"
        )
    for key in ("single_submit", "overlap_events"):
        if not isinstance(config.get(key, False), bool):
            raise ValueError(f"expected `bool`, got `{type(config[key]).__name__}` at aio.{key}")
    return {
        "block_bytes": config.get("block_size", 1 << 20),
        "queue_depth": config.get("queue_depth", 8),
        "threads": threads,
        "single_submit": config.get("single_submit", False),
        "overlap_events": config.get("overlap_events", True),
    }
