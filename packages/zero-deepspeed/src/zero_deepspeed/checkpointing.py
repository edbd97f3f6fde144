"""`deepspeed.checkpointing`: activation checkpointing, configured by DeepSpeed's call."""

from __future__ import annotations

from typing import Any

from zero_core import checkpointing


def configure(mpu_: Any = None, deepspeed_config: Any = None, *options: Any, **named: Any) -> None:
    """As `zero_core.checkpointing.configure`; ``deepspeed_config``: a dict or the path of a JSON file."""
    checkpointing.configure(mpu_, deepspeed_config, *options, **named)
