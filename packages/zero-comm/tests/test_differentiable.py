"""The all-to-all that autograd runs backward through, against the transposition that it is."""

from __future__ import annotations

import pytest
import torch
from comm_ranks import data_group, values

from zero_comm import Ledger, Tag, all_to_all, run_ranks

TAG = Tag("exchange", "heads")
SIZE = 6


def exchanged() -> tuple[torch.Tensor, torch.Tensor, int, int]:
    group = data_group(ledger := Ledger())
    flat = values(group.rank, group.world_size * SIZE, torch.float64).view(group.world_size, 2, 3).requires_grad_()
    out = all_to_all(flat, group, TAG)
    weights = values(group.rank, out.numel(), torch.float64, seed=1).view_as(out)
    (out * weights).sum().backward()
    assert flat.grad is not None
    return out.detach(), flat.grad, ledger.calls("exchange"), ledger.sent_bytes("exchange")


def transposed(world_size: int, seed: int) -> torch.Tensor:
    rows = [values(rank, world_size * SIZE, torch.float64, seed) for rank in range(world_size)]
    return torch.stack(rows).view(world_size, world_size, 2, 3).transpose(0, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_backward_sends_every_gradient_back_to_where_its_value_came_from(world_size: int) -> None:
    for rank, (out, gradient, calls, sent) in enumerate(run_ranks(exchanged, world_size)):
        assert torch.equal(out, transposed(world_size, 0)[rank])
        assert torch.equal(gradient, transposed(world_size, 1)[rank])
        assert calls == (0 if world_size == 1 else 2)
        assert sent == 2 * (world_size - 1) * SIZE * 8


def second_derivatives() -> torch.Tensor:
    group = data_group()
    flat = values(group.rank, group.world_size * SIZE, torch.float64).requires_grad_()
    (first,) = torch.autograd.grad(all_to_all(flat, group, TAG).square().sum(), flat, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), flat)
    return second


def test_backward_can_be_differentiated() -> None:
    assert all(torch.equal(second, torch.full_like(second, 2.0)) for second in run_ranks(second_derivatives, 2))


def uneven() -> str:
    group = data_group()
    try:
        all_to_all(torch.ones(group.world_size + 1), group, TAG)
    except ValueError as error:
        return str(error)
    return "none"


def test_a_tensor_that_does_not_divide_is_refused_by_its_tag() -> None:
    assert all("exchange of 'heads'" in said for said in run_ranks(uneven, 2))
