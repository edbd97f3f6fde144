"""The loss of a sharded sequence against that of one process, however the valid tokens lie."""

from __future__ import annotations

import pytest
import torch
from sequence_ranks import values, world
from torch.nn.functional import cross_entropy

from zero_comm import run_ranks
from zero_sequence import sequence_loss, shift_labels

LENGTH, WORDS = 8, 5
KINDS = {
    "all": [0, 1, 2, 3, 4, 0, 1, 2],
    "uneven": [-100, -100, -100, 1, 4, 0, 1, 2],
    "none on rank 0": [-100, -100, -100, -100, 4, 0, 1, 2],
    "none": [-100] * LENGTH,
}


def one_process(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    logits = values(1, LENGTH, WORDS).requires_grad_()
    labels = torch.tensor([KINDS[kind]])
    valid = labels != -100
    loss = cross_entropy(logits[valid], labels[valid], reduction="sum") / max(int(valid.sum()), 1)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def sharded(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    group = world()
    logits = values(1, LENGTH, WORDS).chunk(group.world_size, dim=1)[group.rank].clone().requires_grad_()
    labels = torch.tensor([KINDS[kind]]).chunk(group.world_size, dim=1)[group.rank]
    loss = sequence_loss(cross_entropy(logits.flatten(0, 1), labels.flatten()), labels, group)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad / group.world_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_and_averaged_gradients_are_those_of_one_process(world_size: int, kind: str) -> None:
    loss, gradient = one_process(kind)
    told = run_ranks(sharded, world_size, kind)
    assert all(torch.equal(mine, told[0][0]) for mine, _ in told)
    torch.testing.assert_close(told[0][0], loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.cat([part for _, part in told], dim=1), gradient, rtol=0, atol=1e-14)


def test_shifted_labels_say_what_follows_each_token() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3], [4, 5, -100]])).tolist() == [[2, 3, -100], [5, -100, -100]]
