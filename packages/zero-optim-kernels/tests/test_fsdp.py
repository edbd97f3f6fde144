"""FSDP2 with CPU offload: sharded parameters, two ranks, gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: E402

from zero_optim_kernels.torch import CPUAdamW  # noqa: E402


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 3))


def train(optimizer_class: type, module: torch.nn.Module, options: dict[str, object]) -> torch.optim.Optimizer:
    optimizer = optimizer_class(module.parameters(), lr=1e-2, weight_decay=0.1, **options)
    for step in range(4):
        torch.manual_seed(step)
        module(torch.randn(5, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = distributed.init_device_mesh("cpu", (2,))
    whole = model()
    train(torch.optim.AdamW, whole, {})
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = train(CPUAdamW, sharded, {})
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6)
        assert optimizer.state[ours]["exp_avg"].placements == ours.placements
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    coded = model()
    fully_shard(coded, mesh=mesh)
    train(CPUAdamW, coded, {"state_dtype": "int8"})
    for ours, theirs in zip(coded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=0.1, atol=0.02)
    distributed.destroy_process_group()


def test_sharded_parameters_on_the_cpu_follow_the_unsharded_run(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_main, args=(str(tmp_path),), nprocs=2)
