"""The two exchanges of Ulysses: sequence shards of all heads become full sequences of some heads, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_comm import Group, Tag, all_to_all


def sequence_to_heads(tensors: Sequence[torch.Tensor], group: Group, tag: Tag) -> list[torch.Tensor]:
    """Return, for each of ``tensors`` (batch, heads, S/N, size), which hold all heads over this rank's shard of the
    sequence, this rank's heads over the full sequence: (batch, heads/N, S, size).

    ``group``: the N ranks that share the sequence of length S; N must divide the heads. ``tag``: names the exchange in
    the ledger and in errors. Sends (N-1)/N of every tensor; tensors of one dtype and head size travel together.
    Collective; so is backward, which returns gradients to where their values came from.
    """
    if len({(tensor.dtype, tensor.shape[0], *tensor.shape[2:]) for tensor in tensors}) > 1:
        return [sequence_to_heads([tensor], group, tag)[0] for tensor in tensors]
    ranks = group.world_size
    by_rank = [_split_by_rank(tensor, ranks).transpose(0, 1) for tensor in tensors]
    arrived = all_to_all(torch.cat(by_rank, dim=2), group, tag)  # (rank of the shard, batch, heads/N, S/N, size)
    full = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return list(torch.split(full, [slices.shape[2] for slices in by_rank], dim=1))


def heads_to_sequence(output: torch.Tensor, group: Group, tag: Tag) -> torch.Tensor:
    """Return, for ``output`` (batch, S, heads/N, size) of this rank's heads over the full sequence, all heads over this
    rank's shard of the sequence: (batch, S/N, heads, size). The inverse of `sequence_to_heads`.

    ``group``: the N ranks that share the sequence of length S. ``tag``: names the exchange in the ledger and in errors.
    Sends (N-1)/N of ``output``. Collective, and so is backward.
    """
    shards = _split_by_rank(output, group.world_size).transpose(0, 1)
    arrived = all_to_all(shards, group, tag)  # (rank of the heads, batch, S/N, heads/N, size)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _split_by_rank(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return ``tensor`` (batch, length, ...) with dimension 1 split in two: (batch, ranks, length / ranks, ...)."""
    batch, length, *sizes = tensor.shape
    return tensor.reshape(batch, ranks, length // ranks, *sizes)
