"""Errors of the system become typed errors with numbers, and the engine continues."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

from zero_nvme_aio import AlignedBuffer, Engine, errors
from zero_nvme_aio.testing import Delay, Fail, Shorten, faulty_engine

MIB = 1 << 20


def test_a_failing_device_is_a_device_error_with_path_offset_and_bytes(tmp_path: Path, backend: str) -> None:
    with faulty_engine(Fail(on=("write",), min_offset=2 * MIB), backend=backend, block_bytes=MIB) as io:
        with io.open(tmp_path / "f", "w") as file:
            request = io.write(file, AlignedBuffer(4 * MIB), 0)
            with pytest.raises(errors.DeviceError) as caught:
                request.wait()
    error = caught.value
    assert (error.errno, error.path, error.got) == (errno.EIO, str(tmp_path / "f"), 0)
    assert error.offset in (2 * MIB, 3 * MIB)
    assert error.expected == MIB
    assert isinstance(error.free_bytes, int)


def test_a_write_that_failed_unseen_is_reported_by_sync_once(tmp_path: Path, backend: str) -> None:
    with faulty_engine(Fail(on=("write",), limit=1), backend=backend) as io, io.open(tmp_path / "f", "w") as file:
        io.write(file, b"x" * 5000, 0)
        with pytest.raises(errors.DeviceError):
            io.sync(file)
        io.write(file, b"y" * 5000, 0)
        io.sync(file)
    assert (tmp_path / "f").read_bytes() == b"y" * 5000


def test_a_failing_fsync_is_raised(tmp_path: Path) -> None:
    with faulty_engine(Fail(on=("sync",), error=errno.EIO)) as io, io.open(tmp_path / "f", "w") as file:
        io.write(file, b"x", 0).wait()
        with pytest.raises(errors.DeviceError, match="sync of"):
            io.sync(file)


def test_no_space_says_how_much_is_left(tmp_path: Path, backend: str) -> None:
    with faulty_engine(Fail(on=("write",), error=errno.ENOSPC), backend=backend) as io:
        with io.open(tmp_path / "f", "w") as file, pytest.raises(errors.NoSpaceError) as caught:
            io.write(file, b"x" * 100, 0).wait()
    assert isinstance(caught.value.free_bytes, int)
    assert "bytes free" in str(caught.value)


def test_a_transfer_of_nothing_does_not_hang(tmp_path: Path, backend: str) -> None:
    (tmp_path / "f").write_bytes(bytes(MIB))
    with faulty_engine(Shorten(fraction=0.0), backend=backend) as io, io.open(tmp_path / "f", "rw") as file:
        with pytest.raises(errors.EndOfFileError):
            io.read(file, bytearray(MIB), 0).wait()
        with pytest.raises(errors.DeviceError):
            io.write(file, bytes(MIB), 0).wait()


def test_interrupted_transfers_are_tried_again(tmp_path: Path, backend: str) -> None:
    faults = (Fail(error=errno.EINTR, every=3), Fail(error=errno.EAGAIN, every=4))
    data = bytes(range(256)) * 8192
    out = bytearray(len(data))
    with faulty_engine(*faults, backend=backend, block_bytes=1 << 16) as io, io.open(tmp_path / "f", "rw") as file:
        io.write(file, data, 3).wait()
        io.read(file, out, 3).wait()
        assert io.fired > 10
    assert out == data


def test_short_direct_transfers_stay_zero_copy_where_alignment_allows(tmp_path: Path) -> None:
    with faulty_engine(Shorten(every=2, fraction=0.5), block_bytes=MIB) as io, io.open(tmp_path / "f", "rw") as file:
        if not file.direct:
            pytest.skip(file.direct_reason)
        io.write(file, AlignedBuffer(8 * MIB), 0).wait()
        counters = io.counters()
    assert counters["continued"] > 0
    assert counters["zero_copy_bytes"] == 8 * MIB


def test_a_wait_that_times_out_leaves_the_request_running(tmp_path: Path) -> None:
    with faulty_engine(Delay(seconds=0.3)) as io, io.open(tmp_path / "f", "w") as file:
        request = io.write(file, b"x" * 10, 0)
        with pytest.raises(errors.WaitTimeoutError):
            request.wait(0.01)
        assert not request.done()
        assert request.wait(10) == 10


def test_cancel_stops_what_was_not_started(tmp_path: Path) -> None:
    with faulty_engine(Delay(seconds=0.05), block_bytes=1 << 16, queue_depth=2) as io:
        with io.open(tmp_path / "f", "w") as file:
            request = io.write(file, AlignedBuffer(64 << 16), 0)
            request.cancel()
            with pytest.raises(errors.RequestCancelledError):
                request.wait(10)
        assert io.counters()["bytes_written"] < 64 << 16


def test_after_an_error_the_engine_goes_on(tmp_path: Path, backend: str) -> None:
    with faulty_engine(Fail(every=2), backend=backend, block_bytes=4096) as io, io.open(tmp_path / "f", "rw") as file:
        for _ in range(50):
            with pytest.raises(errors.DeviceError):
                io.write(file, bytes(100_000), 0).wait()
    with Engine(backend=backend) as io, io.open(tmp_path / "f", "rw") as file:
        io.write(file, bytes(100_000), 0).wait()


def test_errors_travel_between_processes() -> None:
    error = errors.NoSpaceError("full", errno=28, path="/x", offset=1, expected=2, got=3, free_bytes=4)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.NoSpaceError
    assert vars(again) == vars(error)
    assert (str(again), again.errno, again.filename) == ("full", 28, "/x")
