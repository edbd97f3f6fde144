"""Nothing a user passes ends the process; everything ends in an error that names it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero_nvme_aio import AlignedBuffer, Engine, _header, errors

MIB = 1 << 20


@pytest.fixture
def io(backend: str) -> Any:
    with Engine(backend=backend) as engine:
        yield engine


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: np.zeros((4, 4))[:, 1], "C-contiguous"),
        (lambda: np.zeros((4, 4), order="F"), "C-contiguous"),
        (lambda: np.zeros((4, 4))[::-1], "C-contiguous"),
        (lambda: memoryview(bytearray(10))[::2], "C-contiguous"),
        (lambda: "text", "got str"),
        (lambda: 5, "got int"),
        (lambda: None, "got NoneType"),
        (lambda: [bytearray(2), 3], "got int"),
        (lambda: np.array([object()]), "Python objects"),
    ],
)
def test_memory_that_cannot_be_used_is_refused(io: Engine, tmp_path: Path, make: Callable[[], Any], words: str) -> None:
    with io.open(tmp_path / "f", "rw") as file:
        for action in (io.write, io.read):
            with pytest.raises(errors.InvalidBufferError, match=words):
                action(file, make(), 0)


@pytest.mark.parametrize("make", [lambda: b"bytes", lambda: memoryview(b"b"), lambda: _read_only_array()])
def test_reading_into_read_only_memory_is_refused(io: Engine, tmp_path: Path, make: Callable[[], Any]) -> None:
    with io.open(tmp_path / "f", "rw") as file, pytest.raises(errors.InvalidBufferError, match="read-only"):
        io.read(file, make(), 0)


def _read_only_array() -> np.ndarray[Any, Any]:
    array = np.zeros(5)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("offset", [-1, -(2**63), 2**63 - 1, 2**63, 2**64, 2**100])
def test_offsets_that_no_file_has_are_refused(io: Engine, tmp_path: Path, offset: int) -> None:
    with io.open(tmp_path / "f", "rw") as file:
        for action in (io.write, io.read):
            with pytest.raises(errors.InvalidOffsetError, match="offset"):
                action(file, bytearray(10), offset)


def test_an_offset_beyond_what_the_file_system_takes_is_an_error(io: Engine, tmp_path: Path) -> None:
    with io.open(tmp_path / "f", "rw") as file:
        with pytest.raises(errors.TransferError):
            io.write(file, bytes(10), 2**63 - 4096).wait()
        with pytest.raises(errors.TransferError):
            io.read(file, AlignedBuffer(MIB), 2**62).wait()


def test_paths_that_cannot_be_opened(io: Engine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, mode, kind in [
        ("missing", "r", errors.MissingPathError),
        ("missing/f", "w", errors.MissingPathError),
        (".", "r", errors.DirectoryPathError),
        (".", "rw", errors.DirectoryPathError),
        ("pipe", "r", errors.OpenError),
        ("x" * 300, "w", errors.OpenError),
        ("a\0b", "w", errors.OpenError),
    ]:
        with pytest.raises(kind) as caught:
            io.open(tmp_path / path, mode)
        assert caught.value.path == str(tmp_path / path)
    with pytest.raises(FileNotFoundError):
        io.open(tmp_path / "missing")
    with pytest.raises(ValueError, match="mode"):
        io.open(tmp_path / "f", "r+")
    with pytest.raises(ValueError, match="direct"):
        io.open(tmp_path / "f", direct="maybe")


def test_a_file_is_used_only_as_it_was_opened(io: Engine, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with io.open(tmp_path / "f") as file, pytest.raises(errors.AccessError, match="'r'"):
        io.write(file, b"y", 0)
    with io.open(tmp_path / "f", "w") as file, pytest.raises(errors.AccessError, match="'w'"):
        io.read(file, bytearray(1), 0)


def test_a_file_of_another_engine_works_only_there(tmp_path: Path) -> None:
    with Engine() as one, Engine() as two, one.open(tmp_path / "f", "rw") as file:
        with pytest.raises(errors.ClosedError, match="another engine"):
            two.write(file, b"x", 0)


def test_a_file_that_shrinks_meanwhile_is_an_end_of_file(io: Engine, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(4 * MIB))
    with io.open(path) as file:
        os.truncate(path, 2 * MIB + 100)
        with pytest.raises(errors.EndOfFileError) as caught:
            io.read(file, AlignedBuffer(4 * MIB), 0).wait()
        assert caught.value.offset == 2 * MIB + 100
        os.truncate(path, 0)
        with pytest.raises(errors.EndOfFileError):
            io.read(file, AlignedBuffer(1), 0).wait()


def test_a_full_disk_is_a_typed_error_and_nothing_synced_is_lost(small_disk: Path, backend: str) -> None:
    with (
        Engine(backend=backend) as io,
        io.open(small_disk / "kept", "w") as kept,
        io.open(small_disk / "f", "w") as file,
    ):
        data = os.urandom(2 * MIB + 3)
        io.write(kept, data, 0).wait()
        io.sync(kept)
        with pytest.raises(errors.NoSpaceError) as caught:
            for number in range(100):
                io.write(file, bytes(MIB), number * MIB).wait()
        assert caught.value.path == str(small_disk / "f")
        assert caught.value.free_bytes is not None
        assert caught.value.free_bytes < 20 * MIB
        with pytest.raises(errors.NoSpaceError):
            io.write(file, AlignedBuffer(100 * MIB), 0).wait()
        with pytest.raises(errors.NoSpaceError):
            io.sync(file)
        assert (small_disk / "kept").read_bytes() == data


def test_a_full_disk_without_preallocation_is_a_typed_error(small_disk: Path, backend: str) -> None:
    with Engine(backend=backend) as io:
        for direct in (True, False):
            with io.open(small_disk / "f", "w", direct=direct, preallocate=False) as file:
                with pytest.raises(errors.NoSpaceError):
                    io.write(file, AlignedBuffer(100 * MIB), 0).wait()


def test_direct_io_that_is_insisted_on_says_why_not(io: Engine) -> None:
    path = f"/dev/shm/zero-nvme-aio-{os.getpid()}"
    try:
        with pytest.raises(errors.OpenError, match="tmpfs"):
            io.open(path, "w", direct=True)
    finally:
        os.unlink(path)


def test_sizes_that_no_memory_has_are_errors() -> None:
    for nbytes in (2**62, 2**63 - 1, 2**64, 2**70):
        with pytest.raises(errors.AioError):
            AlignedBuffer(nbytes)
    with pytest.raises(ValueError, match="-1"):
        AlignedBuffer(-1)


def test_torch_tensors_that_cannot_be_used_are_refused(io: Engine, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    released = torch.ones(100)
    released.untyped_storage().resize_(0)
    bad = {
        "C-contiguous": torch.ones(4, 4).t(),
        "host memory": torch.empty(3, device="meta"),
        "dense": torch.eye(3).to_sparse(),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "storage holds 0": released,
    }
    with io.open(tmp_path / "f", "rw") as file:
        for words, tensor in bad.items():
            with pytest.raises(errors.InvalidBufferError, match=words):
                io.write(file, tensor, 0)
    assert "torch" in sys.modules


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":[],"shape":[],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[' + "9223372036854775807," * 200_000 + '1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
    ids=["dtype", "dimensions", "twice", "surrogate"],
)
def test_headers_built_to_hurt_are_refused_at_once(header: str) -> None:
    begin = time.process_time()
    with pytest.raises(errors.FormatError, match="'file'"):
        _header.parse("file", header.encode(), 1)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("offsets", [[0, 2], [1, 2]], ids=["size", "hole"])
def test_a_name_of_any_length_is_cut_in_the_message(offsets: list[int]) -> None:
    header = f'{{"{"n" * 50_000}":{{"dtype":"U8","shape":[1],"data_offsets":{offsets}}}}}'
    with pytest.raises(errors.FormatError, match="tensor 'nnn") as caught:
        _header.parse("file", header.encode(), 2)
    assert len(str(caught.value)) < 1000
