"""Tensors give their memory back for a while and are the same tensors afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from zero_offload import HostStore, NvmeStore, ShardError, park, unpark


@pytest.fixture(params=["host", "nvme", "nvme, two buffers"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> HostStore | NvmeStore:
    if request.param == "host":
        return HostStore(device="cpu")
    return NvmeStore(tmp_path, device="cpu", buffer_count=5 if request.param == "nvme" else 2, verify=True)


def states(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{kind}": value
        for number, state in enumerate(optimizer.state.values())
        for kind, value in state.items()
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_states_are_parked_between_two_phases_of_training(store: HostStore | NvmeStore) -> None:
    results = []
    for parked in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 40))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            train(model, optimizer, 2)
            if parked:
                tensors = states(optimizer)
                assert park(tensors, store) == sum(t.numel() * t.element_size() for t in tensors.values())
                assert all(t.untyped_storage().nbytes() == 0 for t in tensors.values())
                assert park(tensors, store) == 0
                unpark(tensors, store)
                assert not any(name in store for name in tensors)
        results.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert torch.equal(results[0], results[1])


def test_tensors_that_share_memory_go_and_come_together(store: HostStore | NvmeStore) -> None:
    base = torch.arange(1000.0)
    tensors = {"base": base, "part": base[100:200].view(10, 10), "empty": torch.empty(0), "scalar": torch.tensor(3)}
    assert park(tensors, store) == 4008
    assert tensors["part"].shape == (10, 10)
    unpark(tensors, store)
    assert torch.equal(base, torch.arange(1000.0))
    assert torch.equal(tensors["part"], torch.arange(100.0, 200.0).view(10, 10))
    base[100] = -1
    assert float(tensors["part"][0, 0]) == -1
    assert int(tensors["scalar"]) == 3


def test_what_cannot_be_parked_or_is_not_there_is_named(store: HostStore | NvmeStore) -> None:
    kept = torch.ones(3)
    with pytest.raises(ValueError, match="'foreign': its memory belongs to somebody else"):
        park({"kept": kept, "foreign": torch.from_numpy(np.ones(3))}, store)
    assert torch.equal(kept, torch.ones(3))
    park({"kept": kept}, store)
    with pytest.raises(ShardError, match="'other' is not parked"):
        unpark({"other": kept}, store)
    unpark({"kept": kept}, store)
    assert torch.equal(kept, torch.ones(3))
