"""What goes wrong underneath comes up as a typed error that names the tensor, the file and the offset."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import NUMELS, Lender, plans, update_of
from shards import one_step as shard_step
from torch import nn

from zero_nvme_aio.testing import Fail, FaultyEngine, faulty_engine
from zero_offload import (
    NvmeStore,
    OffloadedOptimizer,
    OffloadError,
    ShardCorruptError,
    ShardError,
    StoreFullError,
    TierOptions,
    offload_activations,
)
from zero_offload.ends import HostUse, tier_ends


def data_file(folder: Path) -> Path:
    return max((path for path in folder.iterdir() if path.suffix != ".lock"), key=lambda path: path.stat().st_size)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


def shortened(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    with NvmeStore(tmp_path, device="cpu", buffer_count=1, verify=True) as made:
        made.put("first", torch.randn(50_000))
        made.put("second", torch.randn(50_000))
        made.flush()
        yield made


def test_a_flipped_bit_is_found(store: NvmeStore, tmp_path: Path) -> None:
    path = data_file(tmp_path)
    flip(path, 100_000)
    with pytest.raises(ShardCorruptError, match="'first'") as caught:
        store.acquire("first")
    assert (caught.value.tensor, caught.value.path) == ("first", str(path))
    assert caught.value.offset_bytes is not None
    assert caught.value.offset_bytes <= 100_000 < caught.value.offset_bytes + 200_000
    store.acquire("second")


def test_a_truncated_file_is_found(store: NvmeStore, tmp_path: Path) -> None:
    store.acquire("first")  # so that the one buffer does not hold the second
    store.release("first", dirty=False)
    path = data_file(tmp_path)
    shortened(path, 300_000)
    with pytest.raises(ShardCorruptError, match="'second'") as caught:
        store.acquire("second")
    assert (caught.value.tensor, caught.value.path) == ("second", str(path))
    assert caught.value.offset_bytes is not None
    assert 200_000 <= caught.value.offset_bytes <= 300_000


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with faulty_engine(Fail(on=("write",), error=errno.ENOSPC)) as engine:
        with NvmeStore(tmp_path, device="cpu", engine=engine) as store:
            store.put("big", torch.zeros(100_000))
            with pytest.raises(StoreFullError, match="cannot write 'big'.*no space is left") as caught:
                store.flush()
            assert caught.value.tensor == "big"
            assert caught.value.path is not None
            assert caught.value.path.startswith(str(tmp_path))
            with pytest.raises(ShardError, match="'big'"):
                store.acquire("big")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_file_system_is_named(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        with NvmeStore(tmp_path, device="cpu", buffer_count=1) as store:
            with pytest.raises(StoreFullError) as caught:
                for number in range(4):
                    store.put(f"shard {number}", torch.zeros(100_000))
                store.flush()
            assert caught.value.tensor in {"shard 2", "shard 3"}
            assert caught.value.path is not None
            store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_device_that_fails_while_reading_is_named(tmp_path: Path) -> None:
    with faulty_engine(Fail(on=("read",), first=0)) as engine:
        with NvmeStore(tmp_path, device="cpu", buffer_count=1, engine=engine) as store:
            store.put("a", torch.zeros(50_000))
            store.put("b", torch.zeros(50_000))
            with pytest.raises(ShardError, match="cannot read 'a'.*device failed"):
                store.acquire("a")


def model_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def one_step(model: nn.Module, optimizer: OffloadedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()


def offloaded(model: nn.Module, path: Path, engine: FaultyEngine | None = None) -> OffloadedOptimizer:
    return OffloadedOptimizer(
        model, "AdamW", tier="nvme", path=path, sub_group_size=4096, buffer_count=2, verify=True, engine=engine
    )


def test_a_step_over_a_damaged_file_is_refused_and_so_are_the_ones_after_it(tmp_path: Path) -> None:
    model = model_of(128)
    with offloaded(model, tmp_path) as optimizer:
        one_step(model, optimizer)
        saved = optimizer.state_dict()
        flip(data_file(tmp_path), data_file(tmp_path).stat().st_size // 2)
        with pytest.raises(ShardCorruptError, match="cannot read '(0|2).(weight|bias)/exp_avg") as caught:
            one_step(model, optimizer)
        assert caught.value.path == str(data_file(tmp_path))
        assert caught.value.offset_bytes is not None
        with pytest.raises(OffloadError, match="load a saved state"):
            one_step(model, optimizer)
        with pytest.raises(OffloadError, match="not worth saving"):
            optimizer.state_dict()
        optimizer.load_state_dict(saved)
        one_step(model, optimizer)


def test_a_write_that_fails_is_an_error_of_that_step_or_the_next_and_a_saved_state_goes_on(tmp_path: Path) -> None:
    model = model_of(128)
    with faulty_engine(Fail(on=("write",), first=60, limit=2, error=errno.ENOSPC)) as engine:
        with offloaded(model, tmp_path, engine) as optimizer:
            one_step(model, optimizer)
            saved = optimizer.state_dict()
            weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            with pytest.raises(StoreFullError, match="cannot write '.*/exp_avg"):
                for _ in range(10):
                    one_step(model, optimizer)
            while engine.fired < 2:  # the other fault may come with the next writes
                with suppress(StoreFullError):
                    optimizer.load_state_dict(saved)
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
            torch.manual_seed(0)
            one_step(model, optimizer)
    want = model_of(128)
    want.load_state_dict(weights)
    with OffloadedOptimizer(want, "AdamW") as optimizer:
        optimizer.load_state_dict(saved)
        torch.manual_seed(0)
        one_step(want, optimizer)
    assert all(map(torch.equal, model.parameters(), want.parameters()))


def test_an_activation_that_was_damaged_is_found_in_backward(tmp_path: Path) -> None:
    model = model_of(128)
    with offload_activations(model, tier="nvme", path=tmp_path, min_bytes=1000, verify=True) as offload:
        loss = model(torch.randn(64, 128)).square().mean()
    offload.flush()
    flip(data_file(tmp_path), 4096 + 1234)  # behind the page that is kept for a header
    with pytest.raises(ShardCorruptError, match="cannot read 'activation") as caught:
        loss.backward()
    assert caught.value.path == str(data_file(tmp_path))


def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path: Path) -> None:
    program = f"""
import os, signal, torch, zero_offload
store = zero_offload.NvmeStore({str(tmp_path)!r}, device="cpu")
store.put("a", torch.zeros(100_000))
store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program])
    assert data_file(tmp_path).stat().st_size >= 400_000
    with NvmeStore(tmp_path, device="cpu") as store:
        assert not [path for path in tmp_path.iterdir() if path.stat().st_size and path.suffix != ".lock"]
        store.put("a", torch.ones(10))
        assert store.acquire("a")[0] == 1


def gradients_of(shard: str) -> torch.Tensor:
    return torch.ones(NUMELS[shard])


def test_a_damaged_gradient_is_found_before_it_is_used(tmp_path: Path) -> None:
    lender = Lender(torch.bfloat16)
    tier_options = TierOptions(tier="nvme", path=tmp_path, sub_group_size=4096, buffer_count=1, verify=True)
    with update_of(lender, plans(torch.bfloat16), tier_options, gradients="nvme") as update:
        for shard in NUMELS:
            update.add_gradient(shard, gradients_of(shard))
        update.flush()
        path = next(path for path in tmp_path.iterdir() if "gradients" in path.name and path.stat().st_size > 60_000)
        flip(path, 60_000)
        with pytest.raises(ShardCorruptError, match="cannot read 'first/gradient'") as caught:
            update.step()
        assert (caught.value.tensor, caught.value.path) == ("first/gradient", str(path))
        assert not lender.held


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("first", [0, 1, 5, 20])
def test_whenever_the_device_fails_the_step_says_so_and_a_saved_state_goes_on(
    tmp_path: Path, kind: str, first: int
) -> None:
    """Weights, gradients and states in files: the first failure comes up typed, nothing hangs or stays borrowed."""
    with faulty_engine(Fail(on=(kind,), first=first, limit=1)) as engine:
        store = NvmeStore(tmp_path / "weights", device="cpu", buffer_count=3, engine=engine)
        tier_options = TierOptions(
            tier="nvme", path=tmp_path / "states", sub_group_size=4096, buffer_count=2, engine=engine
        )
        start = Lender(torch.bfloat16)
        with update_of(store, plans(torch.bfloat16), tier_options, gradients="nvme") as update:
            with pytest.raises(ShardError) as caught:
                for name, tensor in start.tensors.items():
                    store.put(name, tensor)
                for step in range(10):
                    shard_step(update, step)
                    update.flush()
                    store.flush()
            assert caught.value.tensor is not None
            assert caught.value.path is not None and caught.value.path.startswith(str(tmp_path))
            assert caught.value.offset_bytes is not None
            update.reset()
            update.clear_gradients()
            for name, tensor in start.tensors.items():
                store.put(name, tensor)
            for step in range(3):
                shard_step(update, step)
            update.flush()
        got = torch.cat([store.acquire(name) for name in NUMELS])
        store.close()
    lender = Lender(torch.bfloat16)
    with update_of(lender, plans(torch.bfloat16)) as update:
        for step in range(3):
            shard_step(update, step)
    assert torch.equal(got, lender.flat())


class Scarce:
    """Provides host memory, but none for the use whose purpose is ``without``."""

    def __init__(self, without: str) -> None:
        self._without = without

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        if use.purpose == self._without:
            raise MemoryError(f"no memory for {use.purpose}")
        return torch.zeros(nbytes, dtype=torch.uint8)

    def io_engine(self, given: Any) -> Any:
        return given


@pytest.mark.parametrize("without", ["masters and optimizer states", "gradients"])
def test_an_update_that_is_short_of_memory_leaves_no_files_open(tmp_path: Path, without: str) -> None:
    options = TierOptions(tier="nvme", path=tmp_path, ratio=0.5, sub_group_size=4096)
    lender = Lender(torch.float32)
    with tier_ends(Scarce(without)), pytest.raises(MemoryError, match=f"no memory for {without}"):
        update_of(lender, plans(torch.float32), options)
    update_of(lender, plans(torch.float32), options).close()  # an open store has the folder for itself
