"""The sum along a binary tree: nodes do not depend on who adds them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zero_comm import Group, Tag, TreeSum, run_ranks

NUMEL = 70_000


def leaves(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(NUMEL, generator=generator).mul(10.0**number).to(dtype) for number in range(count)]


def by_hand(parts: list[torch.Tensor]) -> torch.Tensor:
    """The tree, from its definition."""
    if len(parts) == 1:
        return parts[0].float()
    half = len(parts) // 2
    return by_hand(parts[:half]) + by_hand(parts[half:])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("count", (1, 2, 4, 8))
def test_the_sum_of_aligned_blocks_is_a_node_of_the_tree(count: int, dtype: torch.dtype) -> None:
    parts, out = leaves(count, dtype), torch.empty(NUMEL)
    TreeSum()(parts, out, divisor=1, accumulate=False)
    assert torch.equal(out, by_hand(parts))
    TreeSum()(parts, out, divisor=4, accumulate=True)
    assert torch.equal(out, by_hand(parts) + by_hand(parts) / 4)


def test_the_sum_may_replace_one_of_its_slices() -> None:
    parts = leaves(4, torch.float32)
    expected = by_hand(parts)
    TreeSum()(parts, parts[2], divisor=1, accumulate=False)
    assert torch.equal(parts[2], expected)


def test_a_number_of_slices_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="a power of two of slices, got 3"):
        TreeSum()(leaves(3, torch.float32), torch.empty(NUMEL), divisor=1, accumulate=False)


def reduced() -> list[float]:
    group = Group(dist.group.WORLD, slice_sum=TreeSum(), averages=False)
    flat = leaves(4, torch.float32)[group.rank]
    out = torch.empty(NUMEL // 4)
    group.reduce_scatter(flat, out, Tag("reduce", "block")).wait()
    return out.tolist()


def test_a_group_that_does_not_average_gives_the_owners_the_trees_sum() -> None:
    shards = [torch.tensor(shard) for shard in run_ranks(reduced, 4)]
    assert torch.equal(torch.cat(shards), by_hand(leaves(4, torch.float32)))
