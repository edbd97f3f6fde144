"""DDP and FSDP2 save together and load at any other world size, sharding or none."""

from __future__ import annotations

import hashlib
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from processes import run_ranks  # noqa: E402
from torch import nn  # noqa: E402

import zero_ckpt  # noqa: E402
from zero_ckpt import CheckpointError, Interval  # noqa: E402
from zero_ckpt.torch import DistCoordinator, tensor_buffer  # noqa: E402

WIDTHS = (7, 5, 3)


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif kind == "columns":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
            layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Shard(0)]))
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * parameter.detach()
    optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step"))):
            found.update(whole(tensor.detach()).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save(rank: int, root: str, kind: str) -> str:
    model, optimizer = build(kind, seed=1)
    train(model, optimizer)
    zero_ckpt.save(f"{root}/run", {"model": model, "optimizer": optimizer}, step=1)
    before = digest(model, optimizer)
    train(model, optimizer)
    return before + digest(model, optimizer)


def load(rank: int, root: str, kind: str) -> str:
    model, optimizer = build(kind, seed=2)
    zero_ckpt.load(f"{root}/run", {"model": model, "optimizer": optimizer})
    after = digest(model, optimizer)
    train(model, optimizer)
    return after + digest(model, optimizer)


def save_async(rank: int, root: str) -> None:
    model, optimizer = build("fsdp2", seed=1)
    train(model, optimizer)
    group = dist.new_group(backend="gloo")  # beside the group that training uses
    with zero_ckpt.AsyncSaver(DistCoordinator(group)) as saver:
        for step in (1, 2, 3):
            zero_ckpt.save(f"{root}/run", {"model": model, "optimizer": optimizer}, step=step, saver=saver)
            digest(model, optimizer)  # collectives of training continue meanwhile
            train(model, optimizer)


def die_while_saving(rank: int, root: str) -> None:
    def data() -> bytes:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return b"x"

    mine = Interval("w", "param", (2,), "U8", rank, data, 1)
    try:
        zero_ckpt.save_sharded(f"{root}/run", "bad", [mine], step=2, coordinator=DistCoordinator())
    except CheckpointError as error:
        Path(root, "told").write_text(str(error))


def test_the_death_of_a_rank_is_a_typed_error_on_the_others(tmp_path: Path) -> None:
    zero_ckpt.save(tmp_path / "run", {"t": torch.ones(3)}, step=1)
    with pytest.raises(RuntimeError, match="^rank 1: ended without an answer$"):
        run_ranks(die_while_saving, 2, tmp_path, str(tmp_path))
    assert "the ranks could not agree, one may be gone" in (tmp_path / "told").read_text()
    assert zero_ckpt.open_checkpoint(tmp_path / "run").step == 1
    zero_ckpt.save(tmp_path / "run", {"t": torch.ones(3)}, step=3)
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_fsdp2_saves_in_the_background(tmp_path: Path) -> None:
    run_ranks(save_async, 2, tmp_path, str(tmp_path))
    checkpoint = zero_ckpt.open_checkpoint(tmp_path / "run")
    assert checkpoint.step == 3 and checkpoint.world_size == 2
    assert zero_ckpt.verify(checkpoint.path).ok


def save_dcp(rank: int, root: str) -> dict[tuple[str, str], bytes]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = build("fsdp2", seed=1)
    train(model, optimizer)
    module_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": module_state, "optim": optimizer_state}, checkpoint_id=f"{root}/dcp")
    held = {(name, "param"): parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        held.update({(name, kind): optimizer.state[parameter][kind] for kind in ("exp_avg", "exp_avg_sq", "step")})
    return {key: bytes(tensor_buffer(whole(tensor).contiguous())) for key, tensor in held.items()}


def test_a_sharded_torch_checkpoint_converts_with_its_optimizer(tmp_path: Path) -> None:
    expected = run_ranks(save_dcp, 2, tmp_path, str(tmp_path))[0]
    zero_ckpt.convert(tmp_path / "dcp", tmp_path / "ours", to="zero-ckpt")
    checkpoint = zero_ckpt.open_checkpoint(tmp_path / "ours")
    assert {key: bytes(checkpoint.read(*key)) for key in checkpoint.tensors} == expected


CASES = [("ddp", 2, "plain", 1), ("fsdp2", 2, "plain", 1), ("plain", 1, "fsdp2", 2), ("fsdp2", 3, "fsdp2", 2),
         ("fsdp2", 2, "columns", 3), ("columns", 2, "ddp", 2)]  # fmt: skip


@pytest.mark.parametrize(("saved", "save_size", "loaded", "load_size"), CASES)
def test_any_sharding_loads_what_any_other_saved(
    tmp_path: Path, saved: str, save_size: int, loaded: str, load_size: int
) -> None:
    written = run_ranks(save, save_size, tmp_path, str(tmp_path), saved)
    read = run_ranks(load, load_size, tmp_path, str(tmp_path), loaded)
    assert len(set(written + read)) == 1
