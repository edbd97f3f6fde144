"""Every kind of host memory is accepted as it is, without a copy in Python."""

from __future__ import annotations

import array
import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero_nvme_aio import AlignedBuffer, BufferPool, Engine, errors
from zero_nvme_aio.errors import ClosedError, WaitTimeoutError

MIB = 1 << 20


class OnlyDLPack:
    """An array of which only the DLPack interface is left."""

    def __init__(self, source: np.ndarray[Any, Any], versioned: bool) -> None:
        self._source, self._versioned = source, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._source.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self._versioned:
            raise TypeError("no such argument")
        return self._source.__dlpack__(**options)


def roundtrip(tmp_path: Path, source: Any, target: Any) -> None:
    with Engine() as io, io.open(tmp_path / "f", "rw") as file:
        request = io.write(file, source, 3)
        assert request.wait() == io.read(file, target, 3).wait()


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "complex64", "bool", "int64", "S3", "datetime64[s]", ">i4", "f4,i2"]
)
def test_numpy_arrays_of_any_dtype(tmp_path: Path, dtype: str) -> None:
    raw = np.random.default_rng(1).integers(0, 255, 4096 * np.dtype(dtype).itemsize, dtype=np.uint8)
    source, target = raw.view(dtype), np.zeros(4096, dtype)
    roundtrip(tmp_path, source, target)
    assert source.tobytes() == target.tobytes()


def test_numpy_arrays_of_any_shape(tmp_path: Path) -> None:
    for shape in [(), (1,), (0, 3), (2, 3, 4), (3, 1, 0)]:
        source, target = np.ones(shape, np.float32), np.zeros(shape, np.float32)
        roundtrip(tmp_path, source, target)
        np.testing.assert_array_equal(source, target)


def test_standard_library_buffers(tmp_path: Path) -> None:
    data = bytes(range(256))
    targets: list[Any] = [bytearray(256), array.array("i", [0] * 64), (ctypes.c_char * 256)(), mmap.mmap(-1, 256)]
    for target in targets:
        roundtrip(tmp_path, data, target)
        assert bytes(memoryview(target).cast("B")) == data


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_of_both_generations(tmp_path: Path, versioned: bool) -> None:
    source, target = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    roundtrip(tmp_path, OnlyDLPack(source, versioned), OnlyDLPack(target, versioned))
    np.testing.assert_array_equal(source, target)
    with pytest.raises(errors.InvalidBufferError, match="C-contiguous"):
        roundtrip(tmp_path, OnlyDLPack(np.ones((4, 4)).T, versioned), target)
    if versioned:
        source.flags.writeable = False
        with pytest.raises(errors.InvalidBufferError, match="read-only"):
            roundtrip(tmp_path, target, OnlyDLPack(source, versioned))


def test_torch_tensors_of_any_dtype(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8):
        source = torch.randint(0, 2, (3, 1000)).to(dtype)
        target = torch.zeros(3, 1000, dtype=dtype)
        roundtrip(tmp_path, source, target)
        assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))
    leaf = torch.ones(10, requires_grad=True)
    roundtrip(tmp_path, leaf, torch.zeros(5, 2))
    roundtrip(tmp_path, torch.tensor(3.0), torch.zeros(()))


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 2 * MIB, 2 * MIB + 1, 9 * MIB + 4095])
@pytest.mark.parametrize("huge_pages", [True, False])
def test_an_aligned_buffer_has_the_exact_size_and_costs_whole_pages(nbytes: int, huge_pages: bool) -> None:
    buffer = AlignedBuffer(nbytes, huge_pages=huge_pages)
    assert len(buffer) == buffer.nbytes == len(memoryview(buffer)) == nbytes
    assert buffer.charged_bytes == buffer.resident_bytes == -(-nbytes // 4096) * 4096
    assert buffer.address % 4096 == 0
    if huge_pages and nbytes >= 2 * MIB:
        assert buffer.address % (2 * MIB) == 0
    assert not any(memoryview(buffer)[:4096])


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the address sanitizer makes mlock do nothing")
def test_a_locked_buffer_is_locked_until_it_goes() -> None:
    def locked_kib() -> int:
        with open("/proc/self/status") as file:
            return int(next(line for line in file if line.startswith("VmLck")).split()[1])

    before = locked_kib()
    buffer = AlignedBuffer(64 * 1024, lock=True)
    assert buffer.locked
    assert locked_kib() - before == 64
    del buffer
    assert locked_kib() == before


def test_a_view_keeps_the_buffer_alive() -> None:
    array_ = np.frombuffer(AlignedBuffer(3 * MIB), dtype=np.float32)
    array_[:] = 2
    assert array_.sum() == array_.size * 2


def test_a_pool_hands_out_each_buffer_once() -> None:
    with BufferPool(8192, 2) as pool:
        assert pool.charged_bytes == 16384
        first, second = pool.take(), pool.take()
        assert first is not second
        with pytest.raises(WaitTimeoutError):
            pool.take(timeout=0.01)
        pool.give_back(first)
        with pytest.raises(ValueError, match="already given back"):
            pool.give_back(first)
        with pool.borrow() as again:
            assert again is first
    with pytest.raises(ClosedError):
        pool.take()
