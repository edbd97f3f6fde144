"""Which ranks share a copy of the model, and which repeat it."""

from __future__ import annotations

import pytest
import torch
from comm_ranks import failure_of

from zero_comm import Mesh, Message, Tag, run_ranks

CPU = torch.device("cpu")


def shape(shard_size: int | None) -> dict[str, object]:
    mesh = Mesh(shard_size=shard_size, device=CPU)
    torch_mesh = mesh.device_mesh
    return {
        "shard": mesh.shard_ranks,
        "replicate": mesh.replicate_ranks,
        "grid": torch_mesh.mesh.tolist(),
        "names": torch_mesh.mesh_dim_names,
    }


def test_consecutive_ranks_share_a_copy_and_strided_ones_repeat_it() -> None:
    results = run_ranks(shape, 4, 2)
    assert [r["shard"] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["replicate"] for r in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(r["grid"] == [[0, 1], [2, 3]] and r["names"] == ("replicate", "shard") for r in results)


def test_by_default_all_ranks_share_one_copy() -> None:
    for rank, result in enumerate(run_ranks(shape, 3, None)):
        assert result["shard"] == [0, 1, 2] and result["replicate"] == [rank]


def sums(shard_size: int) -> tuple[list[float], list[object], int]:
    groups = Mesh(shard_size=shard_size, device=CPU).open_groups()
    rank = torch.distributed.get_rank()
    out = torch.empty(groups.gather.world_size)
    groups.gather.all_gather(out, torch.tensor([float(rank)]), Tag("gather", "u")).wait()
    said = groups.control.agree(Message("hello", "", 0, rank))
    world_size = groups.reduce.world_size
    groups.close()
    groups.close()
    return out.tolist(), said, world_size


@pytest.mark.parametrize(
    ("shard_size", "expected"),
    [(1, [[0], [1], [2], [3]]), (2, [[0, 1], [0, 1], [2, 3], [2, 3]]), (4, [[0, 1, 2, 3]] * 4)],
)
def test_the_groups_of_an_engine_cover_the_shard_axis_only(shard_size: int, expected: list[list[int]]) -> None:
    for (gathered, said, world_size), ranks in zip(run_ranks(sums, 4, shard_size), expected, strict=True):
        assert gathered == said == ranks and world_size == shard_size


def refused(shard_size: int) -> str:
    return failure_of(lambda: Mesh(shard_size=shard_size, device=CPU))


@pytest.mark.parametrize("shard_size", [0, 2, 4])
def test_a_shard_size_that_does_not_divide_the_world_is_refused_with_the_possible_ones(shard_size: int) -> None:
    for text in run_ranks(refused, 3, shard_size):
        assert text.startswith(f"ValueError: shard_size must divide the world size 3, got {shard_size}")
        assert "[1, 3]" in text


def test_a_mesh_without_torch_distributed_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"zero_comm\.init\(\)"):
        Mesh(device=CPU)
