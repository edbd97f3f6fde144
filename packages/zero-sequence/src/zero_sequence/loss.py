"""The mean loss of a sequence whose tokens lie on several ranks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.functional import pad

from zero_comm import NO_STEP, Group, Tag

_TAG = Tag("exchange", "loss", NO_STEP)


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks of a group, in rank order; every rank differentiates its own copy of the
    sum."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the sum of every rank's ``value`` over ``group``, in its shape, the same bits on every rank.
        Collective; waits."""
        ctx.ranks = group.world_size
        told = value.new_empty(group.world_size, *value.shape)
        group.all_gather(told.view(-1), value.contiguous().view(-1), _TAG).wait()
        return told.sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return (gradient of ``value``, None): the gradient of the sum times the number of ranks, which is the sum of
        all ranks' gradients, as these are equal: all ranks differentiate the same loss. Sends nothing."""
        return gradients[0] * ctx.ranks, None


def shift_labels(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return ``labels`` (…, S) moved one place to the left, so that place s holds what follows token s.

    Do this before the sequence is sharded: the last token of a shard is followed by the first of the next. The last
    place of the sequence gets ``ignore_index``.
    """
    return pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def sequence_loss(loss: torch.Tensor, labels: torch.Tensor, group: Group, *, ignore_index: int = -100) -> torch.Tensor:
    """Return the mean loss over all tokens of the sequence group, from this rank's mean over its own.

    ``loss``: the mean over the places of ``labels`` that are not ``ignore_index``; anything if there is none. The
    result is the same on every rank: sum of losses over number of tokens, as one process would compute it, 0 for no
    tokens. Collective; every rank of ``group`` calls backward on its result.

    Its gradients are those of an average: their average over the ranks of the group, or over all ranks of an engine
    that averages, is the gradient of the loss.
    """
    tokens = (labels != ignore_index).sum()
    own = torch.where(tokens > 0, loss * tokens, 0.0)
    total = cast("torch.Tensor", _SumOverRanks.apply(own, group))  # type: ignore[no-untyped-call]
    count = cast("torch.Tensor", _SumOverRanks.apply(tokens.to(torch.float64), group))  # type: ignore[no-untyped-call]
    return total / count.clamp(min=1).to(total.dtype)
