"""Gather, the one reduction and broadcast, against what one process computes from the same values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_ranks import data_group, engine_groups, failure_of, values

from zero_comm import Group, Tag, run_ranks, sum_slices

WORLD_SIZES = [1, 2, 3, 4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
BROADCAST_DTYPES = [
    *DTYPES,
    torch.int64,
    torch.int16,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
"""Buffers of a model have any dtype, also ones that a backend does not know."""
TAG = Tag("gather", "block", 3)


REDUCTIONS = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


def gather(group: Group, numel: int, dtype: torch.dtype, in_place: bool) -> torch.Tensor:
    mine = values(group.rank, numel, dtype)
    out = torch.full((group.world_size * numel,), torch.nan, dtype=dtype)
    if in_place:
        mine = out[group.rank * numel : (group.rank + 1) * numel].copy_(mine)
    group.all_gather(out, mine, TAG).wait()
    return out


def gathers() -> dict[Any, torch.Tensor]:
    group = data_group()
    cases = [(numel, dtype, place) for numel in (37, 0) for dtype in DTYPES for place in (False, True)]
    return {case: gather(group, *case) for case in cases}


def reduce(
    group: Group, numel: int, dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, aliased: bool
) -> torch.Tensor:
    flat = values(group.rank, numel * group.world_size, dtype)
    out = torch.ones(numel, dtype=out_dtype)
    if aliased:
        out = flat[group.rank * numel : (group.rank + 1) * numel]
    group.reduce_scatter(flat, out, Tag("reduce", "block"), accumulate=accumulate).wait()
    return out


def reductions() -> dict[Any, torch.Tensor]:
    group = data_group()
    cases = [(numel, *dtypes, add, False) for numel in (29, 0) for dtypes in REDUCTIONS for add in (False, True)]
    cases.append((50_000, torch.float32, torch.float32, False, True))
    return {case: reduce(group, *case) for case in cases}


def broadcasts() -> dict[torch.dtype, torch.Tensor]:
    group = data_group()
    tensors = {dtype: values(group.rank, 11, dtype) for dtype in BROADCAST_DTYPES}
    tensors[torch.int32] = torch.tensor(group.rank, dtype=torch.int32)
    for tensor in tensors.values():
        group.broadcast(tensor, group.world_size - 1, Tag("broadcast", "buffer")).wait()
    return tensors


@functools.cache
def results(fn: Callable[[], dict[Any, torch.Tensor]], world_size: int) -> list[dict[Any, torch.Tensor]]:
    """All cases of one world size in one run: starting a process group costs more than a collective."""
    return run_ranks(fn, world_size)


def averaged(numel: int, dtype: torch.dtype, out_dtype: torch.dtype, world_size: int) -> torch.Tensor:
    flats = [values(rank, numel * world_size, dtype) for rank in range(world_size)]
    out = torch.empty(numel * world_size, dtype=out_dtype)
    sum_slices(flats, out, divisor=world_size)
    return out


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_gives_every_rank_all_shards_in_rank_order(
    world_size: int, dtype: torch.dtype, in_place: bool
) -> None:
    expected = torch.cat([values(rank, 37, dtype) for rank in range(world_size)])
    for rank in range(world_size):
        assert torch.equal(results(gathers, world_size)[rank][37, dtype, in_place], expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("dtype", "out_dtype"), REDUCTIONS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_is_the_rank_ordered_sum_in_the_accumulate_dtype_divided_once(
    world_size: int, dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool
) -> None:
    expected = averaged(29, dtype, out_dtype, world_size) + (1 if accumulate else 0)
    shards = [r[29, dtype, out_dtype, accumulate, False] for r in results(reductions, world_size)]
    assert torch.equal(torch.cat(shards), expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_may_write_over_its_own_slice_of_the_gradients(world_size: int) -> None:
    shards = [r[50_000, torch.float32, torch.float32, False, True] for r in results(reductions, world_size)]
    assert torch.equal(torch.cat(shards), averaged(50_000, torch.float32, torch.float32, world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_empty_tensors_pass_through(world_size: int) -> None:
    for cases in (*results(gathers, world_size), *results(reductions, world_size)):
        assert all(out.numel() == 0 for case, out in cases.items() if case[0] == 0)


@pytest.mark.parametrize("dtype", BROADCAST_DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_gives_every_rank_the_source_values(world_size: int, dtype: torch.dtype) -> None:
    expected = values(world_size - 1, 11, dtype)
    for rank in range(world_size):
        found = results(broadcasts, world_size)[rank]
        assert torch.equal(found[dtype].view(torch.uint8), expected.view(torch.uint8))
        assert found[torch.int32].item() == world_size - 1


def overlapping() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Several gathers and a reduction in flight at once, finished in the opposite order."""
    group = data_group()
    outs = [torch.empty(group.world_size * 16) for _ in range(4)]
    works = [group.all_gather(out, values(group.rank, 16, torch.float32, k), TAG) for k, out in enumerate(outs)]
    reduced = torch.empty(8)
    works.append(group.reduce_scatter(values(group.rank, 8 * group.world_size, torch.float32, 9), reduced, TAG))
    for work in reversed(works):
        work.wait()
        work.wait()  # a second wait does nothing, in particular no second division
    return outs, reduced


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_in_flight_do_not_mix_and_wait_is_idempotent(world_size: int) -> None:
    results = run_ranks(overlapping, world_size)
    for outs, _ in results:
        for k, out in enumerate(outs):
            assert torch.equal(out, torch.cat([values(rank, 16, torch.float32, k) for rank in range(world_size)]))
    flats = [values(rank, 8 * world_size, torch.float32, 9) for rank in range(world_size)]
    expected = torch.empty(8 * world_size)
    sum_slices(flats, expected, divisor=world_size)
    assert torch.equal(torch.cat([reduced for _, reduced in results]), expected)


def dropped_buffers() -> torch.Tensor:
    group = data_group()
    out = torch.empty(group.world_size * 200_000)
    work = group.all_gather(out, values(group.rank, 200_000, torch.float32), TAG)  # the shard has no other owner
    noise = [torch.full((200_000,), 7.0) for _ in range(4)]
    work.wait()
    del noise
    return out


def test_work_keeps_the_buffers_that_the_transport_reads() -> None:
    expected = torch.cat([values(rank, 200_000, torch.float32) for rank in range(2)])
    for out in run_ranks(dropped_buffers, 2):
        assert torch.equal(out, expected)


def wrong_sizes() -> tuple[str, str]:
    group = data_group()
    return (
        failure_of(group.all_gather, torch.empty(3), torch.empty(2), TAG),
        failure_of(group.reduce_scatter, torch.empty(3), torch.empty(2), Tag("reduce", "head", 4)),
    )


def test_sizes_that_do_not_fit_are_refused_by_tag_before_anything_is_sent() -> None:
    for gathers, reduces in run_ranks(wrong_sizes, 2):
        assert gathers.startswith("ValueError: gather of 'block' in step 3: expected out of 4 elements, got 3")
        assert reduces.startswith("ValueError: reduce of 'head' in step 4: expected flat of 4 elements, got 3")


def use_when_closed() -> list[str]:
    group = engine_groups().gather
    group.close()
    shard, flat, tag = torch.zeros(3), torch.zeros(3 * group.world_size), Tag("gather", "block", 3)
    found = [
        failure_of(group.all_gather, flat, shard, tag),
        failure_of(group.reduce_scatter, flat, shard, tag),
        failure_of(group.all_to_all, torch.empty_like(flat), flat, tag),
        failure_of(group.broadcast, flat, 0, tag),
    ]
    dist.barrier()  # the default group is as it was
    return found


def test_collectives_of_a_closed_group_are_refused_and_do_not_run_on_the_default_group() -> None:
    for rank, found in enumerate(run_ranks(use_when_closed, 2)):
        assert found == [f"CommError: gather of 'block' in step 3: the group of rank {rank} of 2 is closed"] * 4
