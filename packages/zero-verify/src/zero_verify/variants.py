"""The configurations of the runs that are compared."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch

from zero_settings import Config, ConfigError

_UNIT_KEYS = ("unit_max_numel", "unit_min_numel")
_MONITORS = ("comet", "csv_monitor", "tensorboard", "wandb")
_PRECISION = ("fp16", "bf16", "torch_autocast", "data_types", "communication_data_type")


class Variant(enum.Enum):
    """The configurations in which the script is run: the user's own, the reference, and the reference in float32."""

    GIVEN = "given"  # the user's configuration
    REFERENCE = "reference"  # the same dtypes at stage 0, nothing offloaded, compressed or sharded
    FLOAT32 = "float32"  # the reference, all in float32


def variant_config(given: Any, variant: Variant, world_size: int) -> dict[str, Any]:
    """Return the configuration of one variant as plain data, made from ``given``, the user's (as for `initialize`), for
    ``world_size`` ranks.

    In all variants gradients are reduced per micro-batch, which makes the stages bitwise equal, and monitors are off,
    as these runs are not the user's. Where the user's dtypes need stage 1 (16-bit masters), the reference is at stage
    1. Raises `ConfigError` if ``given`` is not valid."""
    resolved = Config.load(given, world_size=world_size)
    always = {"reduce_each_micro_batch": True, **{section: {"enabled": False} for section in _MONITORS}}
    if variant is Variant.GIVEN:
        return {**resolved.raw, **always}
    plain = {**resolved.to_plain(), **always}
    if variant is Variant.FLOAT32:
        plain = {key: value for key, value in plain.items() if key not in _PRECISION}
    units = {key: plain["zero_optimization"][key] for key in _UNIT_KEYS}
    at_stage = [{**plain, "zero_optimization": {"stage": stage, **units}} for stage in (0, 1)]
    try:
        Config.load(at_stage[0], world_size=world_size)
    except ConfigError:
        return at_stage[1]
    return at_stage[0]


def rounding(config: Mapping[str, Any]) -> float:
    """Return the machine epsilon of the 16-bit dtype that the resolved configuration ``config`` computes forward and
    backward in; 0 if it computes in float32 or float64."""
    autocast = config["torch_autocast"]
    if config["fp16"]["enabled"] or (autocast["enabled"] and autocast["dtype"] == "fp16"):
        return torch.finfo(torch.float16).eps
    if config["bf16"]["enabled"] or autocast["enabled"]:
        return torch.finfo(torch.bfloat16).eps
    return 0.0
