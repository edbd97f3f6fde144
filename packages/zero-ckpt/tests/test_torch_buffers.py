"""Tensors reach the disk with their own bytes, and ranks of torch.distributed save together."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from processes import run_ranks  # noqa: E402

from zero_ckpt import CheckpointError, Interval, NotPlainDataError, open_checkpoint, save_sharded  # noqa: E402
from zero_ckpt.torch import DistCoordinator, Stager, dtype_name, tensor_buffer, torch_dtype  # noqa: E402
from zero_ckpt.types import ITEMSIZE  # noqa: E402


@pytest.mark.parametrize("name", ITEMSIZE)
def test_every_dtype_round_trips_as_raw_bytes(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 2, (3 * ITEMSIZE[name],), dtype=torch.uint8)
    tensor = raw.view(torch_dtype(name))
    assert dtype_name(tensor.dtype) == name and tensor.element_size() == ITEMSIZE[name]
    save_sharded(tmp_path, "t", Stager().intervals("w", "param", tensor), step=0)
    out = torch.zeros_like(raw)
    open_checkpoint(tmp_path).read_into("w", "param", 0, tensor_buffer(out))
    assert torch.equal(out, raw)


def test_a_buffer_shares_the_memory_of_its_tensor() -> None:
    tensor = torch.zeros(3)
    view = tensor_buffer(tensor)
    tensor[1] = 1.0
    assert bytes(view[4:8]) == b"\0\0\x80\x3f"
    del tensor
    assert bytes(view[4:8]) == b"\0\0\x80\x3f"
    assert tensor_buffer(torch.empty(0)).nbytes == 0 and tensor_buffer(torch.tensor(1.0)).nbytes == 4
    with pytest.raises(CheckpointError, match="contiguous CPU tensor"):
        tensor_buffer(torch.zeros(3, 2).t())


def test_a_strided_tensor_is_staged(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    save_sharded(tmp_path, "t", Stager().intervals("w", "param", tensor), step=0)
    read = torch.frombuffer(open_checkpoint(tmp_path).read("w", "param"), dtype=torch.float32)
    assert torch.equal(read, tensor.reshape(-1))


def save_as_rank(rank: int, world_size: int, root: str) -> None:
    group = DistCoordinator()
    assert group.all_gather_object({"rank": rank, "long": b"x" * (rank * 1000)}) == [
        {"rank": other, "long": b"x" * (other * 1000)} for other in range(world_size)
    ]
    part = torch.full((5,), float(rank))
    mine = list(Stager().intervals("w", "param", part, shape=(world_size, 5), offset=5 * rank))
    save_sharded(root + "/run", "t", mine, step=1, coordinator=group)
    broken = [Interval("w", "param", (world_size,), "U8", rank, b"" if rank == 1 else b"x")]
    with pytest.raises(CheckpointError, match="no rank contributes elements 1 to 2"):
        save_sharded(root + "/run", "u", broken, step=2, coordinator=group)


def test_processes_save_together(tmp_path: Path) -> None:
    run_ranks(save_as_rank, 2, tmp_path, 2, str(tmp_path))
    expected = torch.arange(2.0).repeat_interleave(5)
    assert open_checkpoint(tmp_path / "run").read("w", "param") == bytes(tensor_buffer(expected))


def give_what_is_not_plain(rank: int, world_size: int) -> None:
    group = DistCoordinator()
    with pytest.raises(NotPlainDataError) as found:
        group.all_gather_object(object() if rank == 1 else {"rank": rank})
    assert found.value.causes == {1: "object is not plain data"}
    with pytest.raises(NotPlainDataError) as found:
        group.all_gather_object("\ud800" * rank)  # half a surrogate pair, which msgpack cannot encode
    assert found.value.causes.keys() == {1, 2}
    assert group.all_gather_object(rank) == list(range(world_size))


def test_what_is_not_plain_data_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(give_what_is_not_plain, 3, tmp_path, 3)
