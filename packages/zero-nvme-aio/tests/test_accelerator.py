"""The staging ring for accelerators, run over host tensors where there is no accelerator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from zero_nvme_aio import Engine, errors
from zero_nvme_aio._device import CHUNK_BYTES, DeviceTransfers
from zero_nvme_aio.testing import Fail, faulty_engine

torch: Any = pytest.importorskip("torch")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 12345])
def test_the_ring_moves_tensors_of_any_size(tmp_path: Path, device: str, nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).to(device)
    target = torch.zeros_like(source)
    with Engine() as io, io.open(tmp_path / "f", "rw") as file:
        ring = DeviceTransfers(io.read, io.write)
        assert ring.submit(True, file, source, 5, False).wait() == nbytes
        assert ring.submit(False, file, target, 5, False).wait() == nbytes
        ring.close()
    assert torch.equal(source, target)


def test_the_ring_is_usable_after_an_error_and_can_be_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        with faulty_engine(Fail(on=("write",), first=3, limit=1)) as io, io.open(tmp_path / "f", "rw") as file:
            ring = DeviceTransfers(io.read, io.write)
            source = torch.arange(3 * CHUNK_BYTES, dtype=torch.int32)
            with pytest.raises(errors.DeviceError):
                ring.submit(True, file, source, 0, False).wait()
            assert await ring.submit(True, file, source, 0, False) == source.nbytes
            target = torch.zeros_like(source)
            await ring.submit(False, file, target, 0, False)
            assert torch.equal(source, target)
            with pytest.raises(errors.EndOfFileError):
                await ring.submit(False, file, target, 1, False)
            ring.close()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["sync", "close", "close the engine"])
def test_what_is_still_in_the_accelerator_is_waited_for(tmp_path: Path, end: str) -> None:
    source = torch.arange(6 * CHUNK_BYTES, dtype=torch.int32)
    with Engine() as io:
        file = io.open(tmp_path / "f", "rw", preallocate=False)
        request = io._get_device_transfers().submit(True, file, source, 0, False)
        if end == "sync":
            io.sync(file)
        elif end == "close":
            file.close()
        else:
            io.close()
        assert request.done()
        written = torch.from_file(str(tmp_path / "f"), size=source.numel(), dtype=torch.int32)
        assert torch.equal(written, source)


def test_an_end_of_the_file_waits_for_reads_and_raises_no_errors(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(4 * CHUNK_BYTES))
    target = torch.ones(4 * CHUNK_BYTES, dtype=torch.uint8)
    beyond = torch.ones(4 * CHUNK_BYTES + 1, dtype=torch.uint8)
    with Engine() as io:
        file = io.open(tmp_path / "f", "r")
        ring = io._get_device_transfers()
        request, refused = (ring.submit(False, file, tensor, 0, False) for tensor in (target, beyond))
        file.close()
        assert request.wait() == target.nbytes
        assert not target.any()
        with pytest.raises(errors.EndOfFileError):
            refused.wait()


@pytest.mark.parametrize("waits", [True, False])
def test_sync_raises_the_error_of_a_failed_write_of_the_accelerator_once(tmp_path: Path, waits: bool) -> None:
    with faulty_engine(Fail(on=("write",), first=3, limit=1)) as io, io.open(tmp_path / "f", "rw") as file:
        request = io._get_device_transfers().submit(
            True, file, torch.arange(3 * CHUNK_BYTES, dtype=torch.int32), 0, False
        )
        if waits:
            request.settle()
        with pytest.raises(errors.DeviceError):
            io.sync(file)
        io.sync(file)
        cancelled = io._get_device_transfers().submit(
            True, file, torch.arange(6 * CHUNK_BYTES, dtype=torch.int32), 0, False
        )
        cancelled.cancel()
        with pytest.raises(errors.RequestCancelledError):
            io.sync(file)


@pytest.mark.gpu
def test_accelerator_tensors_take_the_ring_by_themselves(tmp_path: Path) -> None:
    with Engine() as io, io.open(tmp_path / "f", "rw") as file:
        source = torch.randn(1000, 1000, device="cuda")
        io.write(file, source * 2, 0).wait()
        target = torch.empty_like(source)
        io.read(file, target, 0).wait()
        assert torch.equal(source * 2, target)
        with pytest.raises(errors.InvalidOffsetError):
            io.read(file, target, -1)
    with pytest.raises(errors.ClosedError):
        io.write(file, source, 0)
