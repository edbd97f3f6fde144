"""Save while training goes on: copy now, write later, in a thread.

[Note: asynchronous saves]
`save` copies the intervals into host memory that is kept and reused, and returns; a thread then runs `save_sharded`.
Extents of sealed files are not copied: the thread links them, and holds their `owner` until it is done.
Its collectives run beside those of training, so it needs a coordinator of its own (for torch, a `DistCoordinator` over
a group made for it). Ranks start their saves in the same order, so the threads agree without further ado.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from .direct import make_sink
from .plain import to_plain
from .saving import save_sharded
from .types import ITEMSIZE, Coordinator, FileExtent, Interval, SoloCoordinator, byte_view
from .writer import OpenSink, interval_length

_COPY_BYTES = 16 << 20
_ALIGNMENT = 64


class AsyncSaver:
    """Saves checkpoints in the background, at most `max_pending` at a time.

    `threads` copy the snapshot. `then` is called on the background thread with the path of every checkpoint that was
    written; what it raises counts as a failure of that save. A save that failed raises its CheckpointError, on every
    rank, from the next call of `save`, `check`, `wait` or `close`; training may go on after that. Memory of up to
    `max_pending` snapshots is kept.
    """

    def __init__(
        self,
        coordinator: Coordinator | None = None,
        *,
        max_pending: int = 1,
        threads: int = 4,
        open_sink: OpenSink = make_sink,
        then: Callable[[Path], None] | None = None,
    ) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending is {max_pending}, expected at least 1")
        self._coordinator = coordinator or SoloCoordinator()
        self._open_sink = open_sink
        self._then = then
        self._arenas: queue.Queue[_Arena] = queue.Queue()
        for _ in range(max_pending):
            self._arenas.put(_Arena(threads))
        self._pending = max_pending
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._failures: queue.Queue[Exception] = queue.Queue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zero-ckpt-async", daemon=True)
        self._thread.start()

    def save(self, root: str | os.PathLike[str], tag: str, intervals: Iterable[Interval], **options: Any) -> None:
        """Copy `intervals` and start a save with the options of `save_sharded`; waits while `max_pending` saves run.

        When it returns, the tensors may change. What cannot be copied, such as client state that is not plain data, is
        refused here; the other ranks learn of it as of any failure. What an earlier save met is raised after this one
        was started, so that ranks that learn of it at different times stay in step.
        """
        if self._closed:
            raise ValueError("this AsyncSaver is closed")
        arena = self._arenas.get()
        arguments: dict[str, Any] = {"root": Path(root), "tag": tag, **options}
        try:
            for key in ("client_state", "config", "rank_state"):
                if key in arguments:
                    arguments[key] = to_plain(arguments[key], key)
            arguments["intervals"] = arena.copy(list(intervals))
        except Exception as error:
            self._jobs.put(_Job(arena, {**arguments, "intervals": _Refused(error)}, told=True))
            raise
        except BaseException:
            self._arenas.put(arena)
            raise
        self._jobs.put(_Job(arena, arguments))
        self.check()

    def check(self) -> None:
        """Raise what an earlier save met, if one failed; call it once a step."""
        if not self._failures.empty():
            raise self._failures.get()

    def wait(self) -> None:
        """Wait until every save that was started is done; raises as `check` does."""
        arenas = [self._arenas.get() for _ in range(self._pending)]
        for arena in arenas:
            self._arenas.put(arena)
        self.check()

    def close(self) -> None:
        """Finish what was started, free the memory; raises as `check` does."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()
        self.check()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                path = save_sharded(coordinator=self._coordinator, open_sink=self._open_sink, **job.arguments)
                if self._then is not None:
                    self._then(path)
            except Exception as error:  # raised again by the next call from the training thread
                if not job.told:
                    self._failures.put(error)
            finally:
                job.arguments.clear()
                self._arenas.put(job.arena)


class _Arena:
    """Memory for one snapshot, kept for the next."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory: mmap.mmap | None = None

    def copy(self, intervals: list[Interval]) -> list[Interval]:
        """The same intervals with their data in this arena."""
        sizes = [
            0 if isinstance(interval.data, FileExtent) else interval_length(interval) * ITEMSIZE[interval.dtype]
            for interval in intervals
        ]
        places, total = [], 0
        for size in sizes:
            places.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        memory = memoryview(self._reserve(total))
        copied, copies = [], []
        with ThreadPoolExecutor(self._threads, thread_name_prefix="zero-ckpt-copy") as pool:
            for interval, place, size in zip(intervals, places, sizes, strict=True):
                target = memory[place : place + size]
                data = interval.data
                if isinstance(data, FileExtent):
                    copied.append(interval)
                    continue
                if callable(data):  # its buffer is only good until the next one is asked for
                    target[:] = byte_view(data())
                else:
                    source = byte_view(data)
                    for begin in range(0, size, _COPY_BYTES):
                        end = begin + _COPY_BYTES
                        copies.append(pool.submit(_copy, target[begin:end], source[begin:end]))
                copied.append(replace(interval, data=target, length=None))
            for copy in copies:
                copy.result()
        return copied

    def _reserve(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return self._memory


@dataclass
class _Job:
    """A save to be run with its snapshot; `told` when this rank's failure was raised already."""

    arena: _Arena
    arguments: dict[str, Any]
    told: bool = False


class _Refused:
    """Intervals of a rank that has none to give: it takes part in the save to say why."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Interval]:
        raise self._error


def _copy(target: memoryview, source: memoryview) -> None:
    if source.readonly:  # ctypes gives no address of read-only memory
        target[:] = source
        return
    kind = ctypes.c_char * target.nbytes
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), target.nbytes)  # without the GIL
