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
