"""Save while training continues: copy now, write later, in a thread.

[Note: asynchronous saves]
`save` copies the intervals into host memory that is kept and reused, and returns; a thread then runs `save_sharded`.
Intervals with a `version` are copied after it has returned, on a thread of their own: code that will change their
memory calls `copied` first. Describing many intervals takes longer than copying memory in one piece, so
`later_intervals` is called on that thread too. Extents of sealed files are not copied: the saving thread links them,
and holds their `owner` meanwhile. Its collectives run beside those of training, so it needs a coordinator of its own
(for torch, a `DistCoordinator` over a group made for it). All ranks start their saves in the same order, so their
threads make the same collective calls in the same order.
"""

from __future__ import annotations

import logging
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
from .dry_run import current_dry_run
from .errors import CheckpointError
from .plain import to_plain
from .relative import absolute
from .saving import save_sharded
from .snapshot import Arena, CopyUnderWay, LaterIntervals, no_intervals
from .types import Coordinator, Interval, SoloCoordinator
from .writer import OpenSink

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger("zero_ckpt")


class AsyncSaver:
    """Saves checkpoints in the background, at most `max_pending` at a time.

    `coordinator` is used by these saves only; without one this process is the only rank. `threads` copy the snapshot,
    and `open_sink` is that of `save_sharded`. `then` is called on the background thread with the path of every
    checkpoint that was written; an exception of it counts as a failure of that save. A save that failed raises its
    CheckpointError, on every rank, from the next call of `save`, `check`, `wait` or `close`; training may continue
    after that. Memory of up to `max_pending` snapshots is kept until `close`; `allow` is called with the bytes of one
    before they are allocated, and may raise to refuse them.

    A process that ends without `close`, by an exception too, first finishes the saves that were started, and logs what
    fails then. One that is forked has none of the threads: in it `close` and `copied` do nothing, and `save` and `wait`
    raise CheckpointError.
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
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="zero-ckpt-background-copy")
        self._copying: Future[None] | None = None
        self._pending = max_pending
        self._jobs: queue.Queue[_SaveJob | None] = queue.Queue()
        self._failures: queue.Queue[Exception] = queue.Queue()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="zero-ckpt-async", daemon=True)
        self._thread.start()
        _OPEN.add(self)

    def save(
        self,
        root: str | os.PathLike[str],
        tag: str,
        intervals: Iterable[Interval],
        *,
        memory: Sequence[Buffer] = (),
        later_intervals: LaterIntervals = no_intervals,
        first: Callable[[], object] = lambda: None,
        meanwhile: Callable[[], Mapping[str, Any]] = dict,
        **options: Any,
    ) -> None:
        """Copy `intervals` and start to save them as checkpoint `<root>/<tag>` in the background; waits while
        `max_pending` saves run. `options` are further arguments of `save_sharded`.

        Every rank calls it, in the same order; the ranks talk on the background thread only. `memory` is copied in one
        piece before the call returns. `later_intervals` is called with these copies on the copying thread, and returns
        further intervals: parts of the copies, or memory that nobody writes until `copied` returns. `meanwhile` is
        called while `memory` is being copied, and returns further options. `first` is called on the background thread
        before anything is written, to sync the files of extents, say. An exception of `later_intervals` or `first` is a
        failure of this save. In a dry run (see `zero_ckpt.dry_run`) the save is made before the call returns.

        When the call returns, the tensors may change, except those of intervals with a `version` or from
        `later_intervals`: these may change once `copied` returns. Client state that is not plain data, or other input
        that cannot be copied, raises here; on the other ranks this save fails. If an earlier save has failed, its
        exception is raised after this save was started, so that ranks that learn of it at different times stay in step.
        Raises ValueError after `close`, and CheckpointError in a forked process.
        """
        if self._closed:
            raise ValueError("this AsyncSaver is closed")
        self._require_own_process()
        arena = self._arenas.get()
        arguments: dict[str, Any] = {"root": root, "tag": tag, **options}
        copying: CopyUnderWay | None = None
        try:
            arguments["root"] = absolute(Path(root))  # the script may chdir
            copying = arena.start(memory)
            arguments |= meanwhile()
            for key in ("client_state", "config", "rank_state"):
                if key in arguments:
                    arguments[key] = to_plain(arguments[key], key)
            snapshot = arena.begin(list(intervals), copying, later_intervals)
            if current_dry_run() is None:
                self._copying = self._copier.submit(snapshot.finish)
            else:
                snapshot.finish()
        except Exception as error:
            if copying is not None:
                copying.end()
            self._start(_SaveJob(arena, {**arguments, "intervals": _Refused(error)}, told=True))
            raise
        except BaseException:
            if copying is not None:
                copying.end()
            self._arenas.put(arena)
            raise
        arguments["intervals"] = snapshot.intervals
        self._start(_SaveJob(arena, arguments, self._copying, first))
        self.check()

    def copied(self) -> None:
        """Wait until every copy of the last `save` is made: after that all tensors may change.

        Returns at once if no copy is under way. Raises nothing: a copy that failed makes its save fail.
        """
        if self._copying is not None and os.getpid() == self._pid:
            wait([self._copying])
            self._copying = None

    @property
    def is_busy(self) -> bool:
        """Return whether a save is running or waits to run."""
        return self._arenas.qsize() < self._pending

    @property
    def has_failed(self) -> bool:
        """Return whether a save failed whose exception was not raised yet."""
        return not self._failures.empty()

    def check(self) -> None:
        """Raise the exception of the first save that failed and was not raised yet, if there is one; call it once a
        step."""
        if not self._failures.empty():
            raise self._failures.get()

    def wait(self) -> None:
        """Wait until every save that was started has ended. Raises as `check` does, and CheckpointError in a forked
        process."""
        self._require_own_process()
        arenas = [self._arenas.get() for _ in range(self._pending)]
        for arena in arenas:
            self._arenas.put(arena)
        self.check()

    def close(self) -> None:
        """Wait until the saves that were started have ended, end the threads and free the memory of snapshots. Raises
        as `check` does.

        Further calls only raise what `check` would. In a forked process it does nothing.
        """
        if os.getpid() != self._pid:
            return
        if not self._closed:
            self._closed = True
            _OPEN.discard(self)
            self._jobs.put(None)
            self._thread.join()
            self._copier.shutdown()
            self._copying = None
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

    def _require_own_process(self) -> None:
        """Raise CheckpointError in a process that was forked from the one that made this object."""
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"this AsyncSaver is that of process {self._pid}, from which this one ({os.getpid()}) was forked; make "
                "one after the fork"
            )

    def _start(self, job: _SaveJob) -> None:
        """Hand a save to the background thread. In a dry run the save is made at once, as that thread does not know of
        the dry run."""
        if current_dry_run() is None:
            self._jobs.put(job)
        else:
            self._perform(job)

    def _run(self) -> None:
        """Run the queued saves one after another, on the background thread, until None is queued."""
        while (job := self._jobs.get()) is not None:
            self._perform(job)

    def _perform(self, job: _SaveJob) -> None:
        """Run one save, call `then` with its path, and make its arena, the memory of its copies, free for another save.
        An exception is kept for `check`, unless the training thread has raised it already."""
        try:
            job.prepare()
            path = save_sharded(coordinator=self._coordinator, open_sink=self._open_sink, **job.arguments)
            if self._then is not None:
                self._then(path)
        except Exception as error:  # raised again by the next call from the training thread
            if not job.told:
                self._failures.put(error)
        finally:
            job.drop_references()
            self._arenas.put(job.arena)


def _close_at_exit() -> None:
    """Finish the saves of every saver that was not closed; failures are logged."""
    for saver in list(_OPEN):
        try:
            saver.close()
        except Exception as error:  # nobody is left to raise it to
            logger.error("the process has ended, and a save in the background failed: %s", error)


_OPEN: set[AsyncSaver] = set()
# before the pools of concurrent.futures end, which a save needs; exit functions of atexit come after that
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]


@dataclass
class _SaveJob:
    """A save to be run, with its snapshot (see `zero_ckpt.snapshot`).

    `arena` holds the snapshot, `arguments` are those of `save_sharded`, `copying` is the snapshot's copies under way
    (None if all are made), and `first` is called before the save. `told`: the training thread has already raised this
    rank's exception.
    """

    arena: Arena
    arguments: dict[str, Any]
    copying: Future[None] | None = None
    first: Callable[[], object] | None = None
    told: bool = False

    def prepare(self) -> None:
        """Wait for the snapshot's last copies and call `first`; does not raise.

        If either fails, the save gets intervals that raise the exception, so that every rank learns of it.
        """
        try:
            if self.copying is not None:
                self.copying.result()
            if self.first is not None:
                self.first()
        except Exception as error:  # the other ranks wait to hear of it
            self.arguments["intervals"] = _Refused(error)

    def drop_references(self) -> None:
        """Drop all references to what was kept for the save, as some files are removed with their last reference."""
        self.arguments.clear()
        self.copying = self.first = None


class _Refused:
    """The intervals of a rank whose snapshot failed: iterating raises `error`, so that the save fails on every rank."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Interval]:
        raise self._error
