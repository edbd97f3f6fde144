"""Save while training goes on: copy now, write later, in a thread.

[Note: asynchronous saves]
`save` copies the intervals into host memory that is kept and reused, and returns; a thread then runs `save_sharded`.
Intervals with a `version` are copied behind it, on a thread of their own: code that is about to change their memory
calls `copied` first. Describing many intervals takes longer than copying memory in one piece: those that `behind` gives
are asked for on that thread too. Extents of sealed files are not copied: the thread links them, and holds their `owner`
meanwhile. Its collectives run beside those of training, so it needs a coordinator of its own (for torch, a
`DistCoordinator` over a group made for it). Ranks start their saves in the same order, so the threads agree without
further ado.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .direct import default_copy, make_sink
from .plain import to_plain
from .saving import save_sharded
from .snapshot import Arena, Behind, CopyUnderWay, nothing
from .types import Coordinator, Interval, SoloCoordinator
from .writer import OpenSink

if TYPE_CHECKING:
    from typing_extensions import Buffer


class AsyncSaver:
    """Saves checkpoints in the background, at most `max_pending` at a time.

    `threads` copy the snapshot. `then` is called on the background thread with the path of every checkpoint that was
    written; what it raises counts as a failure of that save. A save that failed raises its CheckpointError, on every
    rank, from the next call of `save`, `check`, `wait` or `close`; training may go on after that. Memory of up to
    `max_pending` snapshots is kept; `allow` is called with the bytes of one before they are allocated, and refuses them
    by raising.
    """

    def __init__(
        self,
        coordinator: Coordinator | None = None,
        *,
        max_pending: int = 1,
        threads: int = 4,
        open_sink: OpenSink = make_sink,
        then: Callable[[Path], None] | None = None,
        allow: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending is {max_pending}, expected at least 1")
        self._coordinator = coordinator or SoloCoordinator()
        self._open_sink = open_sink
        self._then = then
        self._arenas: queue.Queue[Arena] = queue.Queue()
        for _ in range(max_pending):
            self._arenas.put(Arena(threads, allow, default_copy()))
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="zero-ckpt-copy-behind")
        self._copying: Future[None] | None = None
        self._pending = max_pending
        self._jobs: queue.Queue[_SaveJob | None] = queue.Queue()
        self._failures: queue.Queue[Exception] = queue.Queue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zero-ckpt-async", daemon=True)
        self._thread.start()

    def save(
        self,
        root: str | os.PathLike[str],
        tag: str,
        intervals: Iterable[Interval],
        *,
        memory: Sequence[Buffer] = (),
        behind: Behind = nothing,
        first: Callable[[], object] = lambda: None,
        meanwhile: Callable[[], Mapping[str, Any]] = dict,
        **options: Any,
    ) -> None:
        """Copy `intervals` and start a save with the options of `save_sharded`; waits while `max_pending` saves run.

        `behind` gives further intervals, asked for on the thread that copies: parts of the copies of `memory`, which it
        is called with, or memory that nobody writes until `copied` returns. What it raises is a failure of this save.

        `meanwhile` is called while `memory` is being copied, and gives further options.

        `first` is called on the background thread before anything is written, to sync the files of extents, say; what
        it raises is a failure of this save.

        When it returns, the tensors may change, but for intervals with a `version` and those of `behind`: these when
        `copied` returns. What cannot be copied, such as client state that is not plain data, is refused here; the other
        ranks learn of it as of any failure. What an earlier save met is raised after this one was started, so that
        ranks that learn of it at different times stay in step.
        """
        if self._closed:
            raise ValueError("this AsyncSaver is closed")
        arena = self._arenas.get()
        arguments: dict[str, Any] = {"root": Path(root).absolute(), "tag": tag, **options}  # the script may chdir
        copying: CopyUnderWay | None = None
        try:
            copying = arena.start(memory)
            arguments |= meanwhile()
            for key in ("client_state", "config", "rank_state"):
                if key in arguments:
                    arguments[key] = to_plain(arguments[key], key)
            snapshot = arena.begin(list(intervals), copying, behind)
            self._copying = self._copier.submit(snapshot.finish)
        except Exception as error:
            if copying is not None:
                copying.end()
            self._jobs.put(_SaveJob(arena, {**arguments, "intervals": _Refused(error)}, told=True))
            raise
        except BaseException:
            if copying is not None:
                copying.end()
            self._arenas.put(arena)
            raise
        arguments["intervals"] = snapshot.intervals
        self._jobs.put(_SaveJob(arena, arguments, self._copying, first))
        self.check()

    def copied(self) -> None:
        """Wait until all that was to be copied behind `save` is copied: now all tensors may change.

        Raises nothing: a copy that failed is a failure of its save.
        """
        if self._copying is not None:
            wait([self._copying])
            self._copying = None

    @property
    def is_busy(self) -> bool:
        """Return whether a save is under way."""
        return self._arenas.qsize() < self._pending

    @property
    def has_failed(self) -> bool:
        """Return whether a save failed whose error `check` would raise."""
        return not self._failures.empty()

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
            self._copier.shutdown()
            arenas = [self._arenas.get() for _ in range(self._pending)]
            for arena in arenas:
                arena.close()
                self._arenas.put(arena)
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
                job.await_copies()
                path = save_sharded(coordinator=self._coordinator, open_sink=self._open_sink, **job.arguments)
                if self._then is not None:
                    self._then(path)
            except Exception as error:  # raised again by the next call from the training thread
                if not job.told:
                    self._failures.put(error)
            finally:
                job.let_go()
                self._arenas.put(job.arena)


@dataclass
class _SaveJob:
    """A save to be run with its snapshot; `told` when this rank's failure was raised already."""

    arena: Arena
    arguments: dict[str, Any]
    copying: Future[None] | None = None
    first: Callable[[], object] | None = None
    told: bool = False

    def await_copies(self) -> None:
        """Wait for the copies that the snapshot still lacks, and do what comes first; where that fails, the save will
        say why."""
        try:
            if self.copying is not None:
                self.copying.result()
            if self.first is not None:
                self.first()
        except Exception as error:  # the other ranks wait to hear of it
            self.arguments["intervals"] = _Refused(error)

    def let_go(self) -> None:
        """Drop all that was kept for the save, files that wait for it to be removed among them."""
        self.arguments.clear()
        self.copying = self.first = None


class _Refused:
    """Intervals of a rank that has none to give: it takes part in the save to say why."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Interval]:
        raise self._error
