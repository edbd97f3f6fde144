"""The average with error feedback: one rank's arithmetic followed by hand, the bytes, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_ranks import failure_of, values

from zero_comm import FeedbackAverage, Group, Tag, open_group, run_ranks

TAG = Tag("reduce", "momentum")
STEPS = 4


class Signs:
    """Signs in bytes, and one magnitude per message."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x < 0).to(torch.uint8), x.abs().mean().view(1)

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.where(payload == 1, -scales, scales))

    def payload_nbytes(self, numel: int) -> int:
        return numel

    def scales_numel(self, numel: int) -> int:
        return 1


def signs(x: torch.Tensor) -> torch.Tensor:
    magnitude = x.abs().mean()
    return torch.where(x < 0, -magnitude, magnitude)


def by_hand(world_size: int, numel: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The averages of all steps, and the ranks' last worker and server errors, computed in one process."""
    size = -(-numel // world_size)
    workers = [torch.zeros(world_size, size) for _ in range(world_size)]
    servers = [torch.zeros(size) for _ in range(world_size)]
    averages = []
    for step in range(STEPS):
        sent = []
        for rank, error in enumerate(workers):
            padded = torch.cat((values(rank, numel, torch.float32, seed=step), torch.zeros(size * world_size - numel)))
            compensated = error + padded.view(world_size, size)
            sent.append(torch.stack([signs(row) for row in compensated]))
            workers[rank] = compensated - sent[-1]
            workers[rank].view(-1)[numel:] = 0
        answers = []
        for rank, error in enumerate(servers):
            compensated = error + sum(message[rank] for message in sent) / world_size
            answers.append(signs(compensated))
            servers[rank] = compensated - answers[-1]
            servers[rank][max(0, numel - rank * size) :] = 0
        averages.append(torch.cat(answers)[:numel])
    return averages, workers, servers


def averaged(numel: int) -> dict[str, Any]:
    group = Group(open_group([list(range(dist.get_world_size()))]))
    mean = FeedbackAverage(group, Signs(), numel, torch.device("cpu"))
    averages = []
    for step in range(STEPS):
        x = values(group.rank, numel, torch.float32, seed=step)
        mean.average(x, TAG).wait()
        averages.append(x)
    sent = group.ledger.sent_bytes("reduce")
    wrong = failure_of(mean.average, torch.zeros(numel + 1), TAG)
    return {"averages": averages, "errors": (mean.worker_error, mean.server_error), "sent": sent, "wrong": wrong}


@pytest.mark.parametrize(("world_size", "numel"), [(2, 10), (3, 10), (4, 3), (4, 1000)])
def test_averages_and_errors_are_those_computed_by_hand(world_size: int, numel: int) -> None:
    averages, workers, servers = by_hand(world_size, numel)
    size = -(-numel // world_size)
    for rank, got in enumerate(run_ranks(averaged, world_size, numel)):
        for one, expected in zip(got["averages"], averages, strict=True):
            torch.testing.assert_close(one, expected)
        torch.testing.assert_close(got["errors"], (workers[rank].view(-1), servers[rank]))
        assert got["sent"] == STEPS * 2 * (world_size - 1) * (-(-size // 4) * 4 + 4)
        assert got["wrong"].startswith(f"ValueError: reduce of 'momentum' in step 0: expected {numel} elements")


def repeated(numel: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = Group(open_group([list(range(dist.get_world_size()))]))
    mean = FeedbackAverage(group, Signs(), numel, torch.device("cpu"))
    total = torch.zeros(numel)
    for _ in range(200):
        x = values(group.rank, numel, torch.float32)
        mean.average(x, TAG).wait()
        total += x
    return total, mean.worker_error, mean.server_error


def test_nothing_is_lost_what_the_averages_lack_is_in_the_errors_and_those_stay_small() -> None:
    world_size, numel = 2, 64
    exact = sum(values(rank, numel, torch.float32) for rank in range(world_size)) / world_size * 200
    totals, workers, servers = zip(*run_ranks(repeated, world_size, numel), strict=True)
    for total in totals:
        torch.testing.assert_close(total + sum(workers) / world_size + torch.cat(servers), exact, rtol=1e-4, atol=1e-3)
        assert (total - exact).norm() < 0.05 * exact.norm()


def test_a_single_rank_has_its_own_average() -> None:
    mean, x = FeedbackAverage(Group(None), Signs(), 5, torch.device("cpu")), torch.randn(5)
    before = x.clone()
    mean.average(x, TAG).wait()
    assert torch.equal(x, before) and not bool(mean.worker_error.any())
