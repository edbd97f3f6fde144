"""Which ranks share a copy of the model, and which repeat it."""

from __future__ import annotations

import pytest
import torch
from comm_ranks import failure_of, values

from zero_comm import Mesh, Message, Tag, run_ranks

CPU = torch.device("cpu")
TAG = Tag("reduce", "u")


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


def sums(shard_size: int) -> dict[str, object]:
    groups = Mesh(shard_size=shard_size, device=CPU).open_groups(ranks_per_node=2)
    rank = torch.distributed.get_rank()
    gathered = torch.empty(groups.gather.world_size)
    groups.gather.all_gather(gathered, torch.tensor([float(rank)]), Tag("gather", "u")).wait()
    said = groups.control.agree(Message("hello", "", 0, rank))
    averages = []
    flat = torch.arange(3.0 * shard_size)
    for accumulate in (False, True):  # two open at once: hops of several reductions must not mix
        averages.append(
            (out := torch.ones(3), groups.reduce.reduce_scatter(flat + rank, out, TAG, accumulate=accumulate))
        )
    averages[1][1].advance()
    for _, work in averages:
        work.wait()
    whole = torch.full((2,), float(rank))
    groups.broadcast(whole, 3, Tag("broadcast", "u"))
    ledger = groups.gather.ledger
    groups.close()
    groups.close()
    return {
        "gathered": gathered.tolist(),
        "said": said,
        "averages": [out.tolist() for out, _ in averages],
        "broadcast": whole.tolist(),
        "reduce bytes": (ledger.sent_bytes("reduce"), ledger.across_bytes("reduce")),
    }


@pytest.mark.parametrize(
    ("shard_size", "rows", "sent", "across"),
    [
        # three elements of 4 bytes, twice; among R copies the slice is padded to a multiple of R and travels there and
        # back: with R = 4 that is 2 x 3/4 x 4 elements, two thirds of them to the other node
        (1, [[0], [1], [2], [3]], 48, 32),
        (2, [[0, 1], [0, 1], [2, 3], [2, 3]], 2 * (12 + 16), 2 * 16),
        (4, [[0, 1, 2, 3]] * 4, 2 * 36, 2 * 24),
    ],
)
def test_gathers_cover_the_shard_axis_and_reductions_all_copies(
    shard_size: int, rows: list[list[int]], sent: int, across: int
) -> None:
    for rank, result in enumerate(run_ranks(sums, 4, shard_size)):
        assert result["gathered"] == rows[rank] and result["said"] == [0, 1, 2, 3]
        mine = [3.0 * (rank % shard_size) + i + 1.5 for i in range(3)]
        assert result["averages"] == [mine, [x + 1 for x in mine]]
        assert result["broadcast"] == [3.0, 3.0]
        assert result["reduce bytes"] == (sent, across)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_every_copy_ends_with_the_bits_of_averages_that_travel_in_the_dtype_of_gradients(wire: torch.dtype) -> None:
    for rank, (bits, across) in enumerate(run_ranks(reduced, 4, wire)):
        flats = [values(r, 10, wire) for r in range(4)]
        mine = slice(0, 5) if rank % 2 == 0 else slice(5, 10)
        of_copies = [((flats[c].float()[mine] + flats[c + 1].float()[mine]) / 2).to(wire) for c in (0, 2)]
        expected = ((of_copies[0].float() + of_copies[1].float()) / 2).to(wire).float()
        assert bits == expected.tolist()
        assert across == 6 * wire.itemsize  # half of five elements and one of padding, there and back


def reduced(wire: torch.dtype) -> tuple[list[float], int]:
    groups = Mesh(shard_size=2, device=CPU).open_groups(ranks_per_node=2)
    out = torch.empty(5)
    groups.reduce.reduce_scatter(values(torch.distributed.get_rank(), 10, wire), out, TAG).wait()
    groups.close()
    return out.tolist(), groups.gather.ledger.across_bytes("reduce")


def largest_of_all() -> float:
    groups = Mesh(shard_size=2, device=CPU).open_groups()
    flat, out = torch.full((4,), 65504.0, dtype=torch.float16), torch.empty(2)
    groups.reduce.reduce_scatter(flat, out, TAG).wait()
    groups.close()
    return float(out.max())


def test_what_fits_the_wire_once_does_not_overflow_between_copies() -> None:
    assert run_ranks(largest_of_all, 4) == [65504.0] * 4


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
