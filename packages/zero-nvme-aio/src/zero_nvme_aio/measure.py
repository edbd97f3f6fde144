"""Timing of transfers for `bench`, `tune` and the benchmark against peers."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._engine import Engine
from ._memory import AlignedBuffer

__all__ = ["Sample", "Setting", "file_for_bench", "measure", "median"]


class Setting(NamedTuple):
    """One setting to be measured: backend, bytes per block, blocks in flight, threads. `memory`: "aligned" (zero copy)
    or "plain" (64 bytes off a page, as torch's is). `direct`: direct I/O where the file system can, else through the
    page cache.
    """

    backend: str
    block_bytes: int
    queue_depth: int
    threads: int
    memory: str = "aligned"
    direct: bool = True

    def engine(self) -> Engine:
        """Return a new engine with this setting's backend, block size, depth and threads."""
        return Engine(
            backend=self.backend, block_bytes=self.block_bytes, queue_depth=self.queue_depth, threads=self.threads
        )


class Sample(NamedTuple):
    """One timed transfer: GB/s (1e9 bytes), and processor seconds (user and system, all threads) per GB."""

    gb_per_s: float
    cpu_s_per_gb: float


def measure(action: Callable[[], int]) -> Sample:
    """Run `action`, a transfer that returns the bytes it moved (not 0), and return its timing: wall time, and processor
    time of all threads of this process.
    """
    before, start = _cpu_seconds(), time.perf_counter()
    nbytes = action()
    wall, cpu = time.perf_counter() - start, _cpu_seconds() - before
    return Sample(nbytes / 1e9 / wall, cpu / (nbytes / 1e9))


def median(samples: Sequence[Sample]) -> Sample:
    """Return a sample whose fields are each the median of that field over `samples`."""
    return Sample(statistics.median(s.gb_per_s for s in samples), statistics.median(s.cpu_s_per_gb for s in samples))


def plain_memory(nbytes: int) -> memoryview:
    """Return `nbytes` of zeroed memory aligned as torch allocates it: 64 bytes off a page."""
    return memoryview(AlignedBuffer(nbytes + 64, huge_pages=False))[64:]


def file_for_bench(io: Engine, folder: str, nbytes: int, memory: memoryview | AlignedBuffer) -> str:
    """Write and sync a scratch file of `nbytes` in `folder`, with the content of `memory` repeated, and return its
    path; the caller removes it.
    """
    path = os.path.join(folder, f".zero-nvme-aio-bench-{os.getpid()}")
    with io.open(path, "w") as file:
        for begin in range(0, nbytes, len(memory)):
            io.write(file, memoryview(memory)[: min(len(memory), nbytes - begin)], begin).wait()
        io.sync(file)
    return path


def _cpu_seconds() -> float:
    """Return the processor seconds, user and system, of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
