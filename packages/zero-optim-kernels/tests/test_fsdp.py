"""FSDP2 with CPU offload: sharded parameters, two ranks, gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: E402

from zero_optim_kernels.torch import CPUAdamW  # noqa: E402


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 129), torch.nn.ReLU(), torch.nn.Linear(129, 3))


def sharded_model() -> torch.nn.Module:
    module = model()
    mesh = distributed.init_device_mesh("cpu", (2,))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return module


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        module(torch.randn(5, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def follow_torchs_adamw(rank: int, folder: Path) -> None:
    """Over the same shards: with gloo, FSDP2 of torch 2.8 sums gradients where later ones average them."""
    whole = sharded_model()
    train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1), range(4))
    for state_dtype, rtol, atol in (("float32", 1e-5, 1e-6), ("bfloat16", 0.1, 0.02), ("int8", 0.1, 0.02)):
        sharded = sharded_model()
        optimizer = CPUAdamW(sharded.parameters(), lr=1e-2, weight_decay=0.1, state_dtype=state_dtype)
        train(sharded, optimizer, range(4))
        for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=rtol, atol=atol)
            assert optimizer.state[ours]["exp_avg"].placements == ours.placements


def resume_from_checkpoints(rank: int, folder: Path) -> None:
    """Save half way, load into fresh objects, and end with the bits of the run that was not interrupted."""
    for state_dtype in ("float32", "int8"):
        for whole in (False, True):
            sharded = sharded_model()
            optimizer = CPUAdamW(sharded.parameters(), lr=1e-2, state_dtype=state_dtype)
            train(sharded, optimizer, range(3))
            path = folder / f"{state_dtype}-{whole}"
            options = StateDictOptions(full_state_dict=whole)
            saved: dict[str, Any] = get_optimizer_state_dict(sharded, optimizer, options=options)
            weights = [p.detach().clone() for p in sharded.parameters()]
            if not whole:
                checkpoint.save(saved, checkpoint_id=path)
            other = sharded_model()
            for p, value in zip(other.parameters(), weights, strict=True):
                p.data.copy_(value)
            resumed = CPUAdamW(other.parameters(), lr=1e-2, state_dtype=state_dtype)
            if not whole:
                saved = get_optimizer_state_dict(other, resumed)
                checkpoint.load(saved, checkpoint_id=path)
            set_optimizer_state_dict(other, resumed, saved, options=options)
            train(sharded, optimizer, range(3, 6))
            train(other, resumed, range(3, 6))
            for p, q in zip(sharded.parameters(), other.parameters(), strict=True):
                assert torch.equal(p.to_local(), q.to_local()), (state_dtype, whole)
                for name, value in optimizer.state[p].items():
                    same = resumed.state[q][name]
                    pair = [t.to_local() if hasattr(t, "to_local") else t for t in (value, same)]
                    assert torch.equal(*pair), (state_dtype, whole, name)


def refuse_8_bit_state_of_another_sharding(rank: int, folder: Path) -> None:
    single = model()
    source = CPUAdamW(single.parameters(), lr=1e-2, state_dtype="int8")
    train(single, source, range(2))
    sharded = sharded_model()
    optimizer = CPUAdamW(sharded.parameters(), lr=1e-2, state_dtype="int8")
    train(sharded, optimizer, range(2))
    before = [state["exp_avg_scale"].to_local().clone() for state in optimizer.state.values()]
    with pytest.raises(ValueError, match="state 'exp_avg': expected shape"):
        optimizer.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match=r"expected shape .* 8-bit state loads with the sharding"):
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            state["exp_avg_scale"] = state["exp_avg_scale"].full_tensor().reshape(-1)
        optimizer.load_state_dict(saved)
    for state, scales in zip(optimizer.state.values(), before, strict=True):
        assert torch.equal(state["exp_avg_scale"].to_local(), scales)


SCENARIOS = [follow_torchs_adamw, resume_from_checkpoints, refuse_8_bit_state_of_another_sharding]


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for scenario in SCENARIOS:
        scenario(rank, Path(folder))
        distributed.barrier()
    distributed.destroy_process_group()


# A fork server's processes end without the teardown of an interpreter. With torch 2.13 that can abort, whatever the
# optimizer: DTensor's caches keep the mesh, and so gloo's threads, beyond `destroy_process_group`, and such a thread,
# when it drops the last reference to a tensor of a finished collective (ProcessGroupGloo::runLoop,
# TensorImpl::decref_pyobject, PyEval_AcquireThread), is ended by Python inside a destructor.
def test_sharded_parameters_on_the_cpu_train_save_and_resume(tmp_path: Path) -> None:
    start = torch.multiprocessing.start_processes
    start(rank_main, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
