"""Requests, files and engines: life time, threads, asyncio, fork."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from zero_nvme_aio import AlignedBuffer, Engine, errors
from zero_nvme_aio.testing import Delay, faulty_engine

MIB = 1 << 20


class Tracked(bytearray):
    """A buffer that can be watched."""


def test_a_dropped_request_keeps_its_buffer_until_it_is_done_and_not_longer(tmp_path: Path) -> None:
    with faulty_engine(Delay(seconds=0.2)) as io, io.open(tmp_path / "f", "rw") as file:
        data = Tracked(b"z" * 100_000)
        watch = weakref.ref(data)
        io.write(file, data, 0)
        del data
        gc.collect()
        assert watch() is not None
        io.sync(file)
        gc.collect()
        assert watch() is None
    assert (tmp_path / "f").read_bytes() == b"z" * 100_000


def test_a_buffer_is_free_as_soon_as_wait_returned(tmp_path: Path) -> None:
    with Engine() as io, io.open(tmp_path / "f", "rw") as file:
        data = bytearray(5000)
        request = io.write(file, data, 0)
        request.wait()
        data.extend(b"x")  # a bytearray in use refuses to be resized
        assert request.wait() == 5000


def test_a_request_can_be_awaited_by_many_and_a_cancelled_task_leaves_it_running(tmp_path: Path) -> None:
    async def main() -> None:
        with faulty_engine(Delay(seconds=0.1)) as io, io.open(tmp_path / "f", "rw") as file:
            request = io.write(file, b"q" * 9000, 0)
            task = asyncio.ensure_future(_await(request))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.gather(*[_await(request) for _ in range(5)]) == [9000] * 5
            out = bytearray(9000)
            assert await io.read(file, out, 0) == 9000
            assert out == b"q" * 9000
            with pytest.raises(errors.EndOfFileError):
                await io.read(file, bytearray(9001), 0)

    asyncio.run(main())


async def _await(request: object) -> int:
    return await request  # type: ignore[no-any-return, misc]


def test_submitting_a_gibibyte_takes_less_than_a_millisecond_of_the_processor() -> None:
    # The null backend moves nothing, so what is timed is the call.
    buffer = AlignedBuffer(64 * MIB)
    with Engine(backend="null") as io, io.open("/dev/shm/zero-nvme-aio-submit", "rw") as file:
        os.unlink(file.path)
        times = []
        for _ in range(20):
            start = time.thread_time()
            request = io.write(file, [buffer] * 16, 0)
            times.append(time.thread_time() - start)
            request.wait()
        assert request.nbytes == 1024 * MIB
    assert min(times) < 1e-3


def test_waiting_and_syncing_leave_the_interpreter_to_others(tmp_path: Path) -> None:
    with (
        faulty_engine(Delay(seconds=0.3), Delay(on=("sync",), seconds=0.3)) as io,
        io.open(tmp_path / "f", "rw") as file,
    ):
        ticks: list[float] = []
        stop = threading.Event()

        def tick() -> None:
            while not stop.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.005)

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            for action in (
                lambda: io.write(file, b"x", 0).wait(),
                lambda: io.sync(file),
                lambda: (io.write(file, b"x", 0), file.close()),
            ):
                before = len(ticks)
                action()
                # Held, the interpreter would not have let it run once.
                assert len(ticks) - before >= 3
        finally:
            stop.set()
            thread.join()


def test_ctrl_c_gets_through_a_wait(tmp_path: Path) -> None:
    with faulty_engine(Delay(seconds=1.0)) as io, io.open(tmp_path / "f", "w") as file:
        request = io.write(file, b"x", 0)
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            request.wait()
        timer.join()
        assert request.wait() == 1


def test_closing_the_engine_finishes_what_was_submitted(tmp_path: Path) -> None:
    io = Engine()
    file = io.open(tmp_path / "f", "w")
    request = io.write(file, b"y" * (8 * MIB), 0)
    io.close()
    io.close()
    assert request.wait(0) == 8 * MIB
    file.close()
    assert (tmp_path / "f").stat().st_size == 8 * MIB


def test_leaving_the_interpreter_finishes_what_was_submitted(tmp_path: Path) -> None:
    code = (
        "import sys, zero_nvme_aio as aio; io = aio.Engine(); f = io.open(sys.argv[1], 'w'); "
        "r = io.write(f, b'w' * 30_000_000, 0); sys.exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], check=True, timeout=30)
    assert (tmp_path / "f").read_bytes() == b"w" * 30_000_000


def test_a_forked_child_is_told_and_the_parent_goes_on(tmp_path: Path) -> None:
    with faulty_engine(Delay(seconds=0.2)) as io, io.open(tmp_path / "f", "rw") as file:
        request = io.write(file, b"x" * 5000, 0)
        child = os.fork()
        if child == 0:
            try:
                io.write(file, b"y", 0)
            except errors.ClosedError as error:
                try:
                    request.wait()
                except errors.ClosedError:
                    io.close()
                    os._exit(0 if "after fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert request.wait() == 5000


def test_an_open_file_that_is_dropped_is_closed(tmp_path: Path) -> None:
    with Engine() as io:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            file = io.open(tmp_path / "f", "rw")
            io.write(file, b"x" * 5000, 0).wait()
            del file
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_new_file_is_preallocated_and_ends_where_it_was_written(tmp_path: Path) -> None:
    with Engine() as io, io.open(tmp_path / "f", "w") as file:
        io.write(file, bytes(3 * MIB + 5), 0).wait()
        io.write(file, bytes(10), 3 * MIB + 5).wait()
        assert file.size == 3 * MIB + 15


def test_staging_memory_is_bounded_and_registered_memory_too(tmp_path: Path) -> None:
    from zero_nvme_aio import _native

    data = np.zeros(64 * MIB + 1, np.uint8)[1:]
    engines = [Engine() for _ in range(3)]
    for number, io in enumerate(engines):
        with io.open(tmp_path / str(number), "w") as file:
            io.write(file, data, 0).wait()
            assert io.counters()["staging_bytes"] <= 8 * MIB
    assert sum(io.counters()["registered_bytes"] for io in engines) == _native.pinned_bytes() <= _native.pin_limit()
    for io in engines:
        io.close()
    assert _native.pinned_bytes() == 0


def test_requests_cancelled_at_any_moment_leave_the_staging_ring_whole(tmp_path: Path, backend: str) -> None:
    data = memoryview(bytearray(MIB + 1))[1:]
    with Engine(backend=backend, block_bytes=4096, queue_depth=4) as io, io.open(tmp_path / "f", "rw") as file:
        for number in range(300):
            request = io.write(file, data, 0)
            time.sleep(number * 1e-6)
            request.cancel()
            with contextlib.suppress(errors.RequestCancelledError):
                request.wait(30)
        assert io.write(file, data, 0).wait(30) == MIB


def test_overlap_and_single_submit_give_the_same_bytes(tmp_path: Path) -> None:
    data = os.urandom(2 * MIB + 77)
    for single in (False, True):
        for overlap in (False, True):
            with Engine(block_bytes=65536, queue_depth=4, single_submit=single, overlap_events=overlap) as io:
                with io.open(tmp_path / "f", "rw") as file:
                    out = bytearray(len(data))
                    io.write(file, data, 13).wait()
                    io.read(file, out, 13).wait()
                    assert out == data


@pytest.mark.parametrize(
    "settings", [{"queue_depth": 0}, {"queue_depth": 5000}, {"block_bytes": 4095}, {"threads": 0}, {"threads": True}]
)
def test_numbers_out_of_range_are_refused_by_name(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Engine(**settings)  # type: ignore[arg-type]


def test_an_unknown_backend_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(errors.BackendUnavailableError, match="io_uring, libaio, threads, null"):
        Engine(backend="spdk")
