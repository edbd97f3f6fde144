"""Converts a parameter's state between the 1-D tensors of an update and the shapes of an optimizer's state dict.

A kind is one tensor of state: ``master``, a moment, or the scales of an 8-bit moment (``<moment>_scale``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ._params import Member
from .update._slices import MASTER

__all__ = ["flat_state", "shaped_state"]


def shaped_state(member: Member, state: Mapping[str, torch.Tensor], kinds: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the state of a member, by kind, with views in the parameter's shape instead of 1-D tensors; scales and
    ``step`` are returned as they are. ``kinds``: those that the update keeps of the member.
    """
    shaped = _parameter_shaped(kinds)
    return {kind: value.view(member.param.shape) if kind in shaped else value for kind, value in state.items()}


def flat_state(member: Member, state: Mapping[str, Any], kinds: Collection[str]) -> dict[str, Any]:
    """Return those of ``kinds`` that a member's saved ``state`` has, flattened to 1-D, and its ``step`` as an int.

    torch's SGD saves no step number; its state counts as past the first step. A missing master and missing scales are
    left out. ValueError, naming the member, for a missing moment or another shape.
    """
    flat: dict[str, Any] = {"step": int(state.get("step", 1))}
    shaped = _parameter_shaped(kinds)
    for kind in kinds:
        value = state.get(kind)
        if value is None and kind in shaped - {MASTER}:
            raise ValueError(f"'{member.name}': the saved state has no '{kind}', only {', '.join(sorted(state))}")
        if value is None:
            continue
        if kind in shaped and value.shape != member.param.shape:
            raise ValueError(
                f"'{member.name}': saved '{kind}' has shape {tuple(value.shape)}, "
                f"the parameter has {tuple(member.param.shape)}"
            )
        flat[kind] = value.detach().contiguous().view(-1)
    return flat


def _parameter_shaped(kinds: Collection[str]) -> set[str]:
    """Return those of ``kinds`` that have the shape of the parameter: all but the scales of 8-bit moments."""
    return {kind for kind in kinds if not (kind.endswith("_scale") and kind.removesuffix("_scale") in kinds)}
