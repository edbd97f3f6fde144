"""The quantised gather and reduction: what arrives, within which bound, and how many bytes travel where."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_ranks import failure_of, values

from zero_comm import EngineGroups, Group, Ledger, QuantizedGather, QuantizedReduce, Tag, open_group, run_ranks

MESHES = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3)]
"""World size, ranks per node."""
SIZES = [0, 1, 37, 1000]
TAG = Tag("reduce", "block.0", 4)


class Plain:
    """A codec that loses nothing: the bytes of float64."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.double().view(torch.uint8), torch.empty(0)

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload.clone().view(torch.float64))

    def payload_nbytes(self, numel: int) -> int:
        return 8 * numel

    def scales_numel(self, numel: int) -> int:
        return 0


class Rounded:
    """Multiples of 1/10 of the block's largest magnitude, one block of 16 per scale, 3 bytes per 2 elements so that
    scales need padding."""

    block = 16

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.nn.functional.pad(x.float(), (0, -x.numel() % self.block)).view(-1, self.block)
        scales = rows.abs().amax(1).clamp_min(1e-30) / 10
        codes = (rows / scales.unsqueeze(1)).round().to(torch.int8).view(-1)[: x.numel()].view(torch.uint8)
        return torch.cat((codes, codes[: self.payload_nbytes(x.numel()) - x.numel()])), scales

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        codes = payload[: out.numel()].view(torch.int8)
        out.copy_(codes * scales.repeat_interleave(self.block)[: out.numel()])

    def payload_nbytes(self, numel: int) -> int:
        return numel + (numel + 1) // 2

    def scales_numel(self, numel: int) -> int:
        return -(-numel // self.block)

    def bound(self, x: torch.Tensor) -> torch.Tensor:
        """Largest error of each element of ``x``."""
        rows = torch.nn.functional.pad(x.double(), (0, -x.numel() % self.block)).view(-1, self.block).abs().amax(1)
        return (rows / 20 * (1 + 1e-6)).repeat_interleave(self.block)[: x.numel()]


def reduction(ranks_per_node: int, codec: Any, ledgers: tuple[Ledger, Ledger] | None = None) -> QuantizedReduce:
    """Over all ranks that `run_ranks` started, consecutive ranks sharing a node."""
    grid = torch.arange(dist.get_world_size()).view(-1, ranks_per_node)
    inside, across = ledgers or (Ledger(), Ledger())
    return QuantizedReduce(
        Group(open_group(grid.tolist()), ledger=inside), Group(open_group(grid.T.tolist()), ledger=across), codec
    )


def reduced(over: QuantizedReduce, size: int, dtype: torch.dtype, out_dtype: torch.dtype, missing: int) -> torch.Tensor:
    out = torch.ones(size, dtype=out_dtype)
    flat = values(over.rank, size * over.world_size - missing, dtype)
    over.reduce_scatter(flat, out, TAG, accumulate=missing > 0).wait()
    return out


def plain_reductions(ranks_per_node: int) -> dict[Any, torch.Tensor]:
    over = reduction(ranks_per_node, Plain())
    cases = [(size, torch.float64, torch.float64, 0) for size in SIZES]
    cases += [(37, torch.float32, torch.float32, 0), (37, torch.bfloat16, torch.float32, 20)]
    return {case: reduced(over, *case) for case in cases}


def rounded_reductions(ranks_per_node: int) -> dict[int, torch.Tensor]:
    over = reduction(ranks_per_node, Rounded())
    return {size: reduced(over, size, torch.float32, torch.float32, 0) for size in SIZES}


@functools.cache
def results(fn: Any, world_size: int, *args: Any) -> list[Any]:
    """All cases of one mesh in one run."""
    return run_ranks(fn, world_size, *args)


def padded_flats(size: int, dtype: torch.dtype, world_size: int, missing: int = 0) -> torch.Tensor:
    """The ranks' gradients, float64 of shape (rank, owner, size)."""
    numel = size * world_size
    flats = [values(rank, numel - missing, dtype).double() for rank in range(world_size)]
    return torch.stack([torch.nn.functional.pad(flat, (0, missing)) for flat in flats]).view(
        world_size, world_size, size
    )


@pytest.mark.parametrize(("world_size", "ranks_per_node"), MESHES)
def test_with_a_codec_that_loses_nothing_the_average_arrives_at_its_owner(world_size: int, ranks_per_node: int) -> None:
    for owner, cases in enumerate(results(plain_reductions, world_size, ranks_per_node)):
        for (size, dtype, out_dtype, missing), got in cases.items():
            exact = padded_flats(size, dtype, world_size, missing)[:, owner].mean(0) + (missing > 0)
            assert got.dtype == out_dtype
            torch.testing.assert_close(
                got.double(), exact, rtol=1e-6 if out_dtype == torch.float32 else 1e-14, atol=1e-7
            )


@pytest.mark.parametrize(("world_size", "ranks_per_node"), MESHES)
def test_the_error_is_that_of_the_messages_that_the_terms_came_in(world_size: int, ranks_per_node: int) -> None:
    codec = Rounded()
    for owner, cases in enumerate(results(rounded_reductions, world_size, ranks_per_node)):
        for size, got in cases.items():
            terms = padded_flats(size, torch.float32, world_size)[:, owner]
            nodes = terms.view(world_size // ranks_per_node, ranks_per_node, size)
            local, node = owner % ranks_per_node, owner // ranks_per_node
            sent_inside = [x for group in nodes for number, x in enumerate(group) if number != local]
            allowed = sum((codec.bound(x) for x in sent_inside), torch.zeros(size, dtype=torch.float64))
            for number, group in enumerate(nodes):
                if number != node:
                    allowed += codec.bound(group.abs().sum(0) * 1.1)  # of the sums of what was decoded
            error = (got.double() - terms.mean(0)).abs() * world_size
            assert bool((error <= allowed + 1e-5).all())
            assert world_size == 1 or size < 2 or bool((error > 1e-4).any())


def counted_bytes(ranks_per_node: int) -> tuple[int, int]:
    ledgers = Ledger(), Ledger()
    over = reduction(ranks_per_node, Rounded(), ledgers)
    over.reduce_scatter(values(over.rank, 100 * over.world_size, torch.float32), torch.empty(100), TAG).wait()
    return ledgers[0].sent_bytes("reduce"), ledgers[1].sent_bytes("reduce")


@pytest.mark.parametrize(("world_size", "ranks_per_node"), MESHES)
def test_bytes_are_those_of_the_packets_inside_and_across(world_size: int, ranks_per_node: int) -> None:
    nodes, packet = world_size // ranks_per_node, 152 + 7 * 4  # 150 bytes of payload, padded
    expected = (nodes * (ranks_per_node - 1) * packet, (nodes - 1) * packet)
    assert results(counted_bytes, world_size, ranks_per_node) == [expected] * world_size


COPIES = [(2, 1, 1), (4, 2, 2), (4, 1, 2), (4, 2, 4), (4, 4, 2), (6, 3, 3), (6, 2, 3), (6, 3, 1)]
"""World size, ranks of a copy, ranks per node."""


def over_copies(copy: int, ranks_per_node: int) -> dict[str, Any]:
    """Averages over copies of the model through codecs, two at a time, and what they sent."""
    ledger, rank = Ledger(), dist.get_rank()
    rows = [list(range(dist.get_world_size()))]
    groups = EngineGroups.open(
        rows,
        ledger=ledger,
        shard_size=copy,
        ranks_per_node=ranks_per_node,
        gradient_codec=Plain(),
        average_codec=Plain(),
    )
    coarse = EngineGroups.open(
        rows, ledger=ledger, shard_size=copy, ranks_per_node=ranks_per_node, gradient_codec=Rounded()
    )
    outs = [torch.ones(37) for _ in range(3)]
    works = [
        over.reduce.reduce_scatter(values(rank, 37 * copy, torch.float32), out, TAG, accumulate=accumulate)
        for over, out, accumulate in zip((groups, groups, coarse), outs, (False, True, False), strict=True)
    ]
    works[1].advance()
    for work in works:
        work.wait()
    ledger.reset()
    coarse.reduce.reduce_scatter(values(rank, 100 * copy, torch.float32), torch.empty(100), TAG).wait()
    sent = ledger.sent_bytes("reduce"), ledger.across_bytes("reduce")
    groups.close()
    coarse.close()
    return {"exact": outs[0], "added": outs[1], "coarse": outs[2], "sent": sent}


@pytest.mark.parametrize(("world_size", "copy", "ranks_per_node"), COPIES)
def test_copies_of_the_model_average_through_codecs(world_size: int, copy: int, ranks_per_node: int) -> None:
    answers = results(over_copies, world_size, copy, ranks_per_node)
    terms = torch.stack([values(rank, 37 * copy, torch.float32).view(copy, 37) for rank in range(world_size)])
    codec = Rounded()
    for rank, found in enumerate(answers):
        mine = terms[:, rank % copy].double()
        torch.testing.assert_close(found["exact"].double(), mine.mean(0), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found["added"].double(), mine.mean(0) + 1, rtol=1e-6, atol=1e-6)
        assert torch.equal(found["coarse"], answers[rank % copy]["coarse"])  # in all copies the same bits
        # a gradient is rounded at most once in its node, once in its copy, once among copies; then their average
        whole = mine.abs().mean(0) * 1.4
        allowed = sum(codec.bound(x) for x in mine) / world_size + 3 * codec.bound(whole)
        assert bool(((found["coarse"].double() - mine.mean(0)).abs() <= allowed + 1e-5).all())


@pytest.mark.parametrize(("world_size", "copy", "ranks_per_node"), COPIES)
def test_between_copies_packets_of_parts_travel_there_and_back(world_size: int, copy: int, ranks_per_node: int) -> None:
    block = math.gcd(copy, ranks_per_node)
    copies, nodes = world_size // copy, copy // block
    packet, part = 152 + 7 * 4, -(-100 // copies)
    part_packet = -(-(part + (part + 1) // 2) // 4) * 4 + -(-part // 16) * 4
    inside, across = nodes * (block - 1) * packet, (nodes - 1) * packet
    between = 2 * (copies - 1) * part_packet
    for rank, found in enumerate(results(over_copies, world_size, copy, ranks_per_node)):
        start = rank // copy * copy
        of_copy, of_others = range(start + rank % block, start + copy, block), range(rank % copy, world_size, copy)
        far, far_copies = (
            sum(rank // ranks_per_node != r // ranks_per_node for r in ranks) for ranks in (of_copy, of_others)
        )
        assert found["sent"] == (inside + across + between, far * packet + 2 * far_copies * part_packet)


def several_in_flight() -> tuple[list[int], list[torch.Tensor]]:
    ledgers = Ledger(), Ledger()
    over = reduction(2, Plain(), ledgers)
    works, outs, across = [], [torch.empty(10) for _ in range(3)], []
    for number, out in enumerate(outs):
        flat = values(over.rank, 10 * over.world_size, torch.float32, seed=number)
        works.append(over.reduce_scatter(flat, out, Tag("reduce", f"block.{number}")))
    for go_on in (works[1].advance, works[0].advance, works[2].wait, works[0].wait, works[1].wait, works[0].wait):
        go_on()
        across.append(ledgers[1].calls("reduce"))
    return across, outs


def test_advancing_a_reduction_takes_it_and_those_before_it_across_nodes() -> None:
    for owner, (across, outs) in enumerate(results(several_in_flight, 4)):
        assert across == [2, 2, 3, 3, 3, 3]
        for number, out in enumerate(outs):
            flats = [values(rank, 40, torch.float32, seed=number) for rank in range(4)]
            torch.testing.assert_close(out, torch.stack(flats).mean(0).view(4, 10)[owner])


def gathers() -> dict[Any, tuple[torch.Tensor, int]]:
    found = {}
    ledger = Ledger()
    group = Group(open_group([list(range(dist.get_world_size()))]), ledger=ledger)
    over = QuantizedGather(group, Rounded())
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for in_place in (False, True):
                ledger.reset()
                shard, out = (
                    values(over.rank, size, dtype),
                    torch.full((size * over.world_size,), torch.nan, dtype=dtype),
                )
                if in_place:
                    shard = out[over.rank * size : (over.rank + 1) * size].copy_(shard)
                over.all_gather(out, shard, Tag("gather", "block.0")).wait()
                found[size, dtype, in_place] = out, ledger.sent_bytes("gather")
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gather_gives_every_rank_the_same_decoded_slices(world_size: int) -> None:
    codec = Rounded()
    answers = results(gathers, world_size)
    for (size, dtype, in_place), (out, nbytes) in answers[0].items():
        expected = torch.empty(world_size, size, dtype=dtype)
        for rank, target in enumerate(expected):
            codec.decode(*codec.encode(values(rank, size, dtype)), target)
        assert torch.equal(out, expected.view(-1))
        assert all(torch.equal(other[size, dtype, in_place][0], out) for other in answers)
        packet = -(-codec.payload_nbytes(size) // 4) * 4 + 4 * codec.scales_numel(size)
        assert nbytes == (world_size - 1) * packet


class Undecodable(Plain):
    """A codec whose packets cannot be read."""

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        raise ValueError(f"no packet: {payload.numel()} bytes")


def waits_for_what_cannot_be_decoded() -> list[str]:
    over = QuantizedGather(Group(open_group([list(range(dist.get_world_size()))])), Undecodable())
    work = over.all_gather(torch.empty(4 * over.world_size), torch.ones(4), Tag("gather", "block.0"))
    return [failure_of(work.wait) for _ in range(3)]


def test_a_work_whose_result_cannot_be_made_says_so_to_everybody_who_waits() -> None:
    for found in run_ranks(waits_for_what_cannot_be_decoded, 2):
        assert found == ["ValueError: no packet: 32 bytes"] * 3


def refusals() -> list[str]:
    over, out = reduction(1, Plain()), torch.empty(5)
    gather = QuantizedGather(Group(None), Plain())
    return [
        failure_of(over.reduce_scatter, torch.empty(11), out, TAG),
        failure_of(gather.all_gather, torch.empty(4), torch.empty(3), TAG),
    ]


def test_sizes_that_do_not_fit_are_refused_with_the_tag_before_a_byte_is_sent() -> None:
    for first, second in results(refusals, 2):
        assert first == (
            "ValueError: reduce of 'block.0' in step 4: expected flat of at most 10 elements, 5 for each of 2 ranks, "
            "got 11"
        )
        assert second == "ValueError: reduce of 'block.0' in step 4: expected out of 3 elements, got 4"


def exchanged() -> tuple[torch.Tensor, int]:
    group = Group(open_group([list(range(dist.get_world_size()))]))
    flat = torch.arange(3 * group.world_size, dtype=torch.int32) + 100 * group.rank
    out = torch.zeros(group.world_size, 3, dtype=torch.int32)
    group.all_to_all(out, flat, TAG).wait()
    return out, group.ledger.sent_bytes("reduce")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_to_all_sends_slice_r_to_rank_r(world_size: int) -> None:
    for rank, (out, nbytes) in enumerate(results(exchanged, world_size)):
        expected = [[100 * source + 3 * rank + i for i in range(3)] for source in range(world_size)]
        assert out.tolist() == expected
        assert nbytes == (world_size - 1) * 12
