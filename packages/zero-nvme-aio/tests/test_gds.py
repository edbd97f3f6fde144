"""The engine over kvikio. Transfers need a CUDA driver, also those of host memory, so all but one test are `gpu`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero_nvme_aio import AioError, errors
from zero_nvme_aio.gds import GdsEngine


@pytest.fixture
def io() -> Iterator[GdsEngine]:
    pytest.importorskip("kvikio")
    with GdsEngine() as engine:
        yield engine


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is not None, reason="kvikio is installed")
def test_without_kvikio_the_error_says_what_to_install() -> None:
    with pytest.raises(AioError, match=r"pip install zero-nvme-aio\[gds\]"):
        GdsEngine()


@pytest.mark.gpu
def test_cuda_tensors_are_moved(io: GdsEngine, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    source = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    with io.open(tmp_path / "f", "rw") as file:
        io.write(file, source).wait()
        target = torch.zeros_like(source)
        io.read(file, target).wait()
        assert torch.equal(source, target)


@pytest.mark.gpu
def test_requests_behave_as_those_of_the_engine(io: GdsEngine, tmp_path: Path) -> None:
    source = np.random.default_rng(0).integers(0, 255, 9_000_001, dtype=np.uint8)
    target = np.zeros_like(source)

    async def awaited(request: Any) -> int:
        moved: int = await request
        return moved

    with io.open(tmp_path / "f", "rw") as file:
        request = io.write(file, [source[:5], source[5:3_000_000], source[3_000_000:]], 7)
        assert request.wait(30) == source.nbytes
        assert request.done()
        assert request.wait() == source.nbytes
        io.sync(file)
        assert file.size == source.nbytes + 7
        request = io.read(file, target, 7)
        request.cancel()
        assert request.wait() == request.wait(0) == source.nbytes
        np.testing.assert_array_equal(source, target)
        target[:] = 0
        assert asyncio.run(awaited(io.read(file, target, 7))) == source.nbytes
        np.testing.assert_array_equal(source, target)
        assert io.write(file, target[:0], 0).wait() == 0
        beyond = io.read(file, np.zeros(100, np.uint8), source.nbytes)
        for _ in range(2):
            with pytest.raises(errors.TransferError):
                beyond.wait()


@pytest.mark.gpu
def test_wrong_use_is_a_typed_error(io: GdsEngine, tmp_path: Path) -> None:
    memory = np.zeros(100, np.uint8)
    for path, kind in ((tmp_path / "missing", errors.MissingPathError), (tmp_path, errors.DirectoryPathError)):
        with pytest.raises(kind):
            io.open(path)
    with io.open(tmp_path / "f", "w") as file:
        io.write(file, memory).wait()
        with pytest.raises(errors.AccessError):
            io.read(file, memory)
    with io.open(tmp_path / "f") as file:
        for offset in (-1, 2**63):
            with pytest.raises(errors.InvalidOffsetError):
                io.read(file, memory, offset)
        with pytest.raises(errors.InvalidBufferError, match="checksum"):
            io.read(file, memory, checksum=True)
    with pytest.raises(errors.ClosedError):
        io.read(file, memory)
    io.close()
    with pytest.raises(errors.ClosedError):
        io.open(tmp_path / "f")
