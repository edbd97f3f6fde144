"""The all-to-all as an operation of autograd."""

from __future__ import annotations

from typing import Any, cast

import torch

from .group import Group
from .tag import Tag


class _AllToAll(torch.autograd.Function):
    """`Group.all_to_all`, whose transpose is itself: slice r of a gradient goes back to rank r."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, group: Group, tag: Tag) -> torch.Tensor:
        """Return a new tensor in the shape of ``flat`` whose slice r is what rank r sent to this rank. Collective;
        waits. ``tag``: names the collective, here and in `backward`."""
        ctx.group, ctx.tag = group, tag
        flat = flat.contiguous()
        out = torch.empty_like(flat)
        group.all_to_all(out, flat, tag).wait()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of ``flat``: the slices of the output's gradient ``gradients[0]``, each sent back to its
        rank; None for the other arguments of `forward`. Collective; waits."""
        return all_to_all(gradients[0], ctx.group, ctx.tag), None, None


def all_to_all(flat: torch.Tensor, group: Group, tag: Tag) -> torch.Tensor:
    """Return a new tensor like ``flat`` whose slice r is what rank r of ``group`` sent to this rank; slice r of
    ``flat`` goes to rank r. The N slices are equal runs of the elements in row-major order: where N divides the first
    dimension, slices along it. Waits. Collective, and so is the backward pass; ``tag`` names both in the ledger and in
    errors.

    Sends (N-1)/N of ``flat``, and as much in backward. The number of elements of ``flat`` must be a multiple of the
    number N of ranks; raises ValueError otherwise.
    """
    return cast("torch.Tensor", _AllToAll.apply(flat, group, tag))  # type: ignore[no-untyped-call]
