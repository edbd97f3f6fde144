"""Everything beside compute, on an accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shards import GROUPS, NUMELS, Lender, gradient, plans
from torch import nn

from zero_offload import (
    DelayedUpdate,
    HostStore,
    NvmeStore,
    OffloadedOptimizer,
    OffloadedUpdate,
    TierOptions,
    offload_activations,
)

pytestmark = pytest.mark.gpu


def device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        pytest.skip("no accelerator")
    return found


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(300, 900), nn.GELU(), nn.Linear(900, 300)).to(device(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", ["keep", "host", "nvme"])
def test_host_and_nvme_are_equal_to_the_bit_and_follow_torch(
    tmp_path: Path, dtype: torch.dtype, gradients: str
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "host": {"gradients": "keep" if gradients == "keep" else "host"},
        "nvme": {"tier": "nvme", "path": tmp_path, "buffer_count": 3, "verify": True, "gradients": gradients},
    }
    results = {}
    for way, options in ways.items():
        model = build(dtype)
        with OffloadedOptimizer(model, lr=1e-3, sub_group_size=8192, **options) as optimizer:
            losses = train(model, optimizer)
        results[way] = (losses, torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert results["host"][0] == results["nvme"][0]
    assert torch.equal(results["host"][1], results["nvme"][1])
    if dtype == torch.float32:
        model = build(dtype)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        want = torch.cat([p.detach().view(-1) for p in model.parameters()])
        assert float((results["host"][1] - want).norm() / want.norm()) < 1e-5


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    generator = torch.Generator(device=device()).manual_seed(1)
    for _ in range(8):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(64, 300, device=device(), generator=generator).to(next(model.parameters()).dtype)
            loss = (model(x) - x).square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_shards_go_to_the_device_and_back(tmp_path: Path, kind: str) -> None:
    store = HostStore() if kind == "host" else NvmeStore(tmp_path, buffer_count=2, verify=True)
    shards = {f"unit {i}": torch.randn(1_000_003, device=device()) for i in range(5)}
    for name, shard in shards.items():
        store.put(name, shard)
    for _ in range(3):
        store.prefetch(list(shards)[:2])
        for name in shards:
            store.acquire(name).add_(1)
            store.release(name, dirty=True)
    store.flush()
    for name, shard in shards.items():
        assert torch.equal(store.acquire(name), shard.add(1).add(1).add(1))
        store.release(name, dirty=False)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_activations_leave_the_device_and_gradients_stay_the_same(tmp_path: Path, tier: str) -> None:
    model, x = build(torch.float32), torch.randn(512, 300, device=device())
    model(x).square().mean().backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    path = {"path": tmp_path} if tier == "nvme" else {}
    with offload_activations(model, tier=tier, min_bytes=1024, **path) as offload:  # type: ignore[arg-type]
        loss = model(x).square().mean()
    assert offload.memory()[tier] > 0
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True) if p.grad is not None)
    offload.close()


@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize("delayed", [False, True])
def test_shards_on_the_device_are_updated_as_in_host_memory(tmp_path: Path, where: str, delayed: bool) -> None:
    if delayed and where == "nvme":
        pytest.skip("a delayed update keeps its gradients in host memory")
    results = []
    for place in (torch.device("cpu"), device()):
        lender = Lender(torch.bfloat16)
        lender.tensors = {name: tensor.to(place) for name, tensor in lender.tensors.items()}
        tier_options = TierOptions(tier="nvme", path=tmp_path / place.type, sub_group_size=8192, buffer_count=2)
        arguments: Any = (plans(torch.bfloat16), "AdamW", lambda: GROUPS, lender, tier_options)
        update: DelayedUpdate | OffloadedUpdate
        if delayed:
            update = DelayedUpdate(*arguments, device=place)
        else:
            update = OffloadedUpdate(*arguments, gradients=where, device=place)  # type: ignore[arg-type]
        for step in range(4):
            for _ in range(2):
                for name in NUMELS:
                    update.add_gradient(name, gradient(step, name).to(place))
            update.step(grad_scale=0.5)
            update.clear_gradients()
        if isinstance(update, DelayedUpdate):
            update.finish()
        results.append(lender.flat().cpu())
        update.close()
    assert torch.equal(results[0], results[1])
