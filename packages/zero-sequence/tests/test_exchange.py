"""Both exchanges against slicing of the full tensors."""

from __future__ import annotations

import pytest
import torch
from sequence_ranks import values, world

from zero_comm import Ledger, Tag, run_ranks
from zero_sequence import heads_to_sequence, sequence_to_heads

BATCH, LENGTH, SIZE = 2, 12, 3


def exchanged(heads: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor, int, int]:
    group = world(ledger := Ledger())
    local = LENGTH // group.world_size
    full = [values(BATCH, n, LENGTH, size, seed=i) for i, (n, size) in enumerate(zip(heads, sizes, strict=True))]
    mine = [tensor[:, :, group.rank * local :][:, :, :local] for tensor in full]
    there = sequence_to_heads(mine, group, Tag("exchange", "there"))
    back = heads_to_sequence(there[0].transpose(1, 2), group, Tag("exchange", "back"))
    return there, back, ledger.calls("exchange"), ledger.sent_bytes("exchange")


@pytest.mark.parametrize("sizes", [(SIZE, SIZE, SIZE), (SIZE, SIZE, SIZE + 1)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_gets_its_heads_of_the_full_sequence_and_gives_them_back(
    world_size: int, sizes: tuple[int, ...]
) -> None:
    heads = (8, 4, 4)
    full = [values(BATCH, n, LENGTH, size, seed=i) for i, (n, size) in enumerate(zip(heads, sizes, strict=True))]
    for rank, (there, back, calls, sent) in enumerate(run_ranks(exchanged, world_size, heads, sizes)):
        for whole, got in zip(full, there, strict=True):
            assert torch.equal(got, whole.chunk(world_size, dim=1)[rank])
        assert torch.equal(back, full[0].chunk(world_size, dim=2)[rank].transpose(1, 2))
        numel = sum(whole.numel() for whole in (*full, full[0])) // world_size
        assert sent == numel * 8 * (world_size - 1) // world_size
        assert calls == (0 if world_size == 1 else 2 if len(set(sizes)) == 1 else 4)


def gradients() -> tuple[list[torch.Tensor | None], torch.Tensor]:
    group = world()
    local = LENGTH // group.world_size
    full = values(BATCH, 4, LENGTH, SIZE)
    weights = values(BATCH, 4, LENGTH, SIZE, seed=1)
    mine = [full.chunk(group.world_size, dim=2)[group.rank].clone().requires_grad_(i != 1) for i in range(3)]
    there = sequence_to_heads(mine, group, Tag("exchange", "there"))
    part = weights.chunk(group.world_size, dim=1)[group.rank]
    sum((i + 1) * (part * tensor).sum() for i, tensor in enumerate(there)).backward()
    return [tensor.grad for tensor in mine], weights[:, :, group.rank * local :][:, :, :local]


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_come_back_to_the_shard_and_only_where_they_are_wanted(world_size: int) -> None:
    for (query, key, value), weights in run_ranks(gradients, world_size):
        assert torch.equal(query, weights) and key is None and torch.equal(value, 3 * weights)
