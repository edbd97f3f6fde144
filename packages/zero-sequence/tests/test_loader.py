"""Batches of every rank's loader, spread over the sequence group, against the batches themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sequence_ranks import failure_of
from torch.utils.data import DataLoader, IterableDataset

from zero_comm import run_ranks
from zero_sequence import SequenceGroups, SequenceLoader

LENGTH = 8


def batch(rank: int, number: int) -> dict[str, Any]:
    """The batch ``number`` of a rank, of a length of its own."""
    ids = torch.arange(LENGTH * (1 + number))[None] + 1000 * rank + 100 * number
    return {
        "input_ids": ids,
        "labels": ids,
        "flags": ids > 3,
        "scale": torch.tensor(0.5 * rank),
        "names": ["a", number],
    }


class Stream(IterableDataset[dict[str, Any]]):
    """Iterable data without a length; rank 1 has one batch less."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (batch(dist.get_rank(), number) for number in range(3 - dist.get_rank() % 2))


def drawn(kind: str) -> list[list[dict[str, Any]]]:
    groups = SequenceGroups.open(2)
    own = [batch(dist.get_rank(), number) for number in range(2)]
    same = [batch(groups.get_data_parallel_rank(), number) for number in range(2)]
    loader = {
        "list": lambda: SequenceLoader(own, groups),
        "iterable": lambda: SequenceLoader(DataLoader(Stream(), batch_size=None), groups),
        "same": lambda: SequenceLoader(same, groups, source="same"),
    }[kind]()
    epochs = [list(loader), list(loader)]
    if kind != "iterable":
        assert len(loader) == len(epochs[0])
    return epochs


ORDER = {
    "list": lambda group: [(2 * group, 0), (2 * group + 1, 0), (2 * group, 1), (2 * group + 1, 1)],
    "iterable": lambda group: [(2 * group + r, n) for n in range(3) for r in range(2) if r == 0 or n < 2],
    "same": lambda group: [(group, 0), (group, 1)],
}


@pytest.mark.parametrize("kind", ORDER)
def test_each_rank_of_a_group_gets_its_shard_of_every_batch_in_turn(kind: str) -> None:
    for rank, epochs in enumerate(run_ranks(drawn, 4, kind)):
        group, place = divmod(rank, 2)
        for epoch in epochs:
            assert len(epoch) == len(ORDER[kind](group))
            for shard, (source, number) in zip(epoch, ORDER[kind](group), strict=True):
                full = batch(source, number)
                ids = full["input_ids"]
                assert torch.equal(shard["input_ids"], ids.chunk(2, dim=1)[place])
                assert torch.equal(shard["flags"], full["flags"].chunk(2, dim=1)[place])
                follows = torch.cat([ids[:, 1:], torch.tensor([[-100]])], dim=1)
                assert torch.equal(shard["shift_labels"], follows.chunk(2, dim=1)[place])
                half = ids.shape[1] // 2
                assert shard["position_ids"].tolist() == [list(range(place * half, (place + 1) * half))]
                assert shard["scale"] == full["scale"] and shard["names"] == full["names"]


def refused() -> list[str]:
    groups = SequenceGroups.open(2)
    good = batch(0, 0)
    bad = (
        {**good, "input_ids": torch.ones(1, 7, dtype=torch.long)},
        {**good, "extra": object()},
        [good["input_ids"]],
        {"input_ids": torch.ones(3)},
        {**good, 7: torch.ones(1, 8)},
        {**good, 8: "text"},
    )
    rank = dist.get_rank()
    return [failure_of(list, SequenceLoader([one if rank == 1 else good], groups)) for one in bad]


def test_a_bad_batch_of_one_rank_is_an_error_on_every_rank_of_its_group() -> None:
    answers = run_ranks(refused, 2)
    assert answers[0] == answers[1]
    odd, extra, listed, flat, *numbered = answers[0]
    assert "the batch of rank 1 of the sequence group: a batch of length 7 does not split over 2 ranks" in odd
    assert "'extra': expected a tensor or plain data" in extra
    assert "expected batches that are mappings of tensors by name, got list" in listed
    assert "expected a batch with input_ids of (batch, length)" in flat
    for key, answer in zip((7, 8), numbered, strict=True):
        assert answer.startswith("SequenceError") and f"keys are names (str), got int {key}" in answer
