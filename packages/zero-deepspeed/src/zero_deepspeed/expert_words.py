"""`deepspeed.moe.utils`: what scripts ask of a model that could have DeepSpeed's expert layers; here none has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .errors import UnsupportedError

Group = dict[str, Any]
"""One param group of an optimizer."""


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): no layer of ``m`` is DeepSpeed's `MoE`, which cannot be made here."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Return whether a parameter is marked as an expert's, by an attribute ``allreduce`` that is false."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | Sequence[Group], max_group_size: float | None = None
) -> list[Group]:
    """Return the param groups as a list: without experts' parameters there is nothing to split.

    ``max_group_size`` has no effect. Raises ValueError for anything but one group or a sequence of them, and
    `UnsupportedError` where `is_moe_param` holds for a parameter of one.
    """
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"param_groups: expected a param group or a list of them, got {type(param_groups).__name__}")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(parameter) for group in groups for parameter in group["params"]):
        raise UnsupportedError(
            "param_groups: a parameter has allreduce=False, an expert of DeepSpeed's expert parallelism, which is not "
            "available here; leave the attribute out, and ZeRO shards experts as other modules"
        )
    return groups
