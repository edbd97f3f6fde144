"""Tests that every engine must pass. Needs no pytest itself: subclass it in a test module."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

from .. import errors
from .._engine import Engine
from .._memory import AlignedBuffer

__all__ = ["EngineConformance"]


class EngineConformance:
    """Subclass, override `make_engine`, and let pytest collect the subclass.

    >>> class TestMyBackend(EngineConformance):
    ...     def make_engine(self, **settings):
    ...         return Engine(backend="libaio", **settings)

    `make_engine` takes the settings of `Engine` and returns something with its interface. `folder` may be overridden to
    test on another file system.
    """

    def make_engine(self, **settings: Any) -> Engine:
        """Return a new engine with these settings; the subclass must override it."""
        raise NotImplementedError

    def folder(self, tmp_path: Path) -> Path:
        """Return the folder for a test's files, `tmp_path` unless a subclass chooses another."""
        return tmp_path

    def test_what_was_written_is_read_back_at_any_size_and_offset(self, tmp_path: Path) -> None:
        sizes = [0, 1, 511, 512, 4095, 4096, 4097, 65536, 65537, (1 << 20) - 1, 1 << 20, (3 << 20) + 7]
        offsets = [0, 1, 511, 512, 4096, 8191, (1 << 20) + 3]
        with self.make_engine(block_bytes=1 << 18) as io, io.open(self.folder(tmp_path) / "any", "rw") as file:
            for size in sizes:
                data = _pattern(size)
                for offset in offsets:
                    out = bytearray(size)
                    assert io.write(file, data, offset).wait() == size
                    assert io.read(file, out, offset).wait() == size
                    assert out == data, f"{size} bytes at offset {offset}"

    def test_neighbouring_bytes_are_left_alone(self, tmp_path: Path) -> None:
        before = bytearray(_pattern(200_000))
        with self.make_engine(block_bytes=1 << 16) as io, io.open(self.folder(tmp_path) / "near", "rw") as file:
            io.write(file, before, 0).wait()
            for begin, end in [(1, 2), (4095, 4097), (4096, 8192), (5000, 150_001)]:
                patch = bytes(end - begin)
                io.write(file, patch, begin).wait()
                before[begin:end] = patch
            out = bytearray(len(before))
            io.read(file, out, 0).wait()
            assert out == before

    def test_unaligned_memory_and_aligned_memory_give_the_same(self, tmp_path: Path) -> None:
        data = _pattern((2 << 20) + 4096 + 5)
        with self.make_engine() as io, io.open(self.folder(tmp_path) / "memory", "rw") as file:
            for shift in (0, 1, 64, 512):
                memory = memoryview(AlignedBuffer(len(data) + shift))[shift:]
                memory[:] = data
                io.write(file, memory, 0).wait()
                out = memoryview(AlignedBuffer(len(data) + shift))[shift:]
                io.read(file, out, 0).wait()
                assert out == data, f"memory {shift} bytes off a page"

    def test_a_list_of_buffers_is_one_range_of_the_file(self, tmp_path: Path) -> None:
        sizes = [0, 1, 4096, 300_000, 7, 0, 1 << 20]
        parts = [_pattern(size, seed) for seed, size in enumerate(sizes)]
        outs = [bytearray(size) for size in reversed(sizes)]
        with self.make_engine(block_bytes=1 << 17) as io, io.open(self.folder(tmp_path) / "list", "rw") as file:
            assert io.write(file, parts, 77).wait() == sum(sizes)
            io.read(file, outs, 77).wait()
        assert b"".join(outs) == b"".join(parts)

    def test_checksums_are_those_of_the_bytes(self, tmp_path: Path) -> None:
        data = _pattern((5 << 20) + 123)
        out = bytearray(len(data))
        with self.make_engine(block_bytes=1 << 16) as io, io.open(self.folder(tmp_path) / "sum", "rw") as file:
            written = io.write(file, data, 9, checksum=True)
            written.wait()
            got = io.read(file, out, 9, checksum=True)
            got.wait()
            whole = io.write(file, memoryview(data)[:-1], 9, checksum=True)
            whole.wait()
        assert written.checksum is not None
        assert written.checksum == got.checksum != whole.checksum

    def test_reading_past_the_end_is_an_error_that_says_where(self, tmp_path: Path) -> None:
        path = self.folder(tmp_path) / "short"
        path.write_bytes(_pattern(100_000))
        with self.make_engine(block_bytes=1 << 16) as io, io.open(path) as file:
            request = io.read(file, bytearray(200_000), 0)
            try:
                request.wait()
            except errors.EndOfFileError as error:
                assert error.path == str(path)
                assert error.offset is not None
                assert error.offset <= 100_000
            else:
                raise AssertionError("a read past the end ended well")

    def test_many_requests_at_once_do_not_mix(self, tmp_path: Path) -> None:
        generator = random.Random(7)
        spans, position = [], 0
        for _ in range(120):
            size = generator.choice([1, 100, 4096, 10_000, 70_000, 1 << 18])
            spans.append((position, size))
            position += size
        data = [_pattern(size, number) for number, (_, size) in enumerate(spans)]
        outs = [bytearray(size) for _, size in spans]
        order = list(range(len(spans)))
        generator.shuffle(order)
        with self.make_engine(block_bytes=1 << 15, queue_depth=16) as io:
            with io.open(self.folder(tmp_path) / "many", "rw") as file:
                for request in [io.write(file, data[i], spans[i][0]) for i in order]:
                    request.wait()
                for request in [io.read(file, outs[i], spans[i][0]) for i in order]:
                    request.wait()
        assert outs == data

    def test_several_threads_may_wait_for_one_request(self, tmp_path: Path) -> None:
        data = _pattern(4 << 20)
        results: list[int] = []
        with self.make_engine() as io, io.open(self.folder(tmp_path) / "threads", "rw") as file:
            request = io.write(file, data, 0)
            threads = [threading.Thread(target=lambda: results.append(request.wait())) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert request.done()
        assert results == [len(data)] * 4

    def test_sync_covers_requests_that_nobody_waited_for(self, tmp_path: Path) -> None:
        path = self.folder(tmp_path) / "sync"
        data = _pattern((1 << 20) + 11)
        with self.make_engine() as io, io.open(path, "w") as file:
            for number in range(4):
                io.write(file, data, number * len(data))
            io.sync(file)
            assert path.read_bytes() == data * 4

    def test_a_closed_file_and_a_closed_engine_say_so(self, tmp_path: Path) -> None:
        io = self.make_engine()
        file = io.open(self.folder(tmp_path) / "closed", "rw")
        file.close()
        _expect(errors.ClosedError, lambda: io.read(file, bytearray(1), 0))
        other = io.open(self.folder(tmp_path) / "closed", "rw")
        io.close()
        _expect(errors.ClosedError, lambda: io.write(other, b"x", 0))
        _expect(errors.ClosedError, lambda: io.open(self.folder(tmp_path) / "closed"))
        other.close()


def _pattern(size: int, seed: int = 1) -> bytes:
    """Return `size` pseudo-random bytes, the same for the same size and seed."""
    return random.Random(size * 1_000_003 + seed).randbytes(size)


def _expect(kind: type[Exception], action: Any) -> None:
    """Call `action` without arguments; AssertionError unless it raises this kind of exception."""
    try:
        action()
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")
