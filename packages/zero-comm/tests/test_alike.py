"""A world in which only one rank exists: counts and buffers of a real one, work that does not grow with its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from zero_comm import EngineGroups, LedgerRow, Message, Tag

NODE, SIZE = 8, 3


class Operations(TorchDispatchMode):
    """Counts the operations on tensors, and the bytes of new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.nbytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format):
            self.nbytes += result.nbytes
        return result


def first_slice(slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool) -> None:
    out.copy_(slices[0])


@contextmanager
def groups_of(world_size: int) -> Iterator[EngineGroups]:
    dist.init_process_group("fake", rank=1, world_size=world_size, store=FakeStore())
    try:
        groups = EngineGroups.open([range(world_size)], ranks_per_node=NODE, slice_sum=first_slice)
        yield groups
        groups.close()
    finally:
        dist.destroy_process_group()


def run(world_size: int) -> tuple[int, int]:
    with groups_of(world_size) as groups:
        full, shard = torch.zeros(world_size * SIZE), torch.zeros(SIZE)
        assert groups.control.agree(Message("report", "loss", 0, [0.5])) == [[0.5]] * world_size
        groups.control.ledger.reset()
        with Operations() as counted:
            groups.gather.all_gather(full, shard, Tag("gather", "a")).wait()
            groups.reduce.reduce_scatter(full, shard, Tag("reduce", "a")).wait()
            groups.gather.all_to_all(torch.empty_like(full), full, Tag("exchange", "a")).wait()
        assert groups.gather.issued + groups.reduce.issued == 3
        sent, across = (world_size - 1) * SIZE * 4, (world_size - NODE) * SIZE * 4
        assert [row for _, _, row in groups.control.ledger] == [LedgerRow(1, sent, across)] * 3
    return counted.calls, counted.nbytes


def test_collectives_count_and_take_what_real_ones_do_with_as_many_operations_for_any_number_of_ranks() -> None:
    (few, small), (many, large) = run(64), run(4096)
    assert few == many
    assert (small, large) == (63 * SIZE * 4, 4095 * SIZE * 4)
