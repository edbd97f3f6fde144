"""A thread beside training that logs which rank the others wait for, and ends waits that would never end.

The store is torch's key-value store, which works also when process groups are broken. Through it the watches of the
ranks ask for and answer with heartbeats. Times ``now`` are those of `time.monotonic`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from .flight_recorder import process_recorder
from .stacks import CodePlace, describe_failure, failed_backward, place_of_main_thread
from .vitals import Process, own_process, processor_ticks
from .watched import Watched

logger = logging.getLogger("zero_comm")

_TICK = 0.5  # seconds between two looks at the store
_ASK_AFTER = 1.0  # seconds of waiting after which a rank asks the others where they are
_NAME_AFTER = 5.0  # seconds of waiting after which the log says for whom
_FAILED_FOR = 2.0  # seconds that others wait for a rank that failed and makes no further call, before it gives up
_STUCK_FOR = 3.0  # seconds that all ranks have to wait for one another
_OWES_BACKWARD = ", and has begun no backward pass since its last forward"
_PEERS_PER_TICK = 32  # bounds the load on the store, which matters only while ranks wait


@dataclass(frozen=True)
class Heartbeat:
    """Where one rank is, as its watch answers.

    ``beat``: running number of the answer. ``waits``: the collective or message for which the rank waits, else empty.
    ``where``: the place of its main thread while it waits for none. ``stuck``: it waits for other ranks, and not for
    data. ``last``: the last call that all ranks took part in. ``micro_batches``: the number that it has counted.
    ``carried``: while it waits for data, the bytes that its connections have carried; None if it does not, or where
    that is not known. ``running``: silent ranks of its host whose processes have used processor time since its last
    answer.
    """

    beat: int
    waits: str
    where: str
    stuck: bool
    last: str
    micro_batches: int
    carried: int | None = None
    running: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return words for a log: where the rank is, its last call, and the micro-batches that it has counted."""
        now = f"waits at {self.waits}" if self.waits else self.where
        return f"{now}; its last call was {self.last}, after {self.micro_batches} micro-batches"


class Watch:
    """Reads ``store`` twice a second, and does nothing else while no rank has waited for a second. Made, it runs in a
    thread until `end`. ``watched``: the state of this rank, number ``rank`` of ``world_size``.

    [Note: the watch] A rank that waits longer asks all ranks for `Heartbeat`s. They answer from this thread, so a slow
    rank that computes answers too, and nothing is done about it. ``give_up(reason)`` is called, from this thread, when
    a wait would never end:
    - on a rank that failed, whose script caught the error, and that makes no further call while others wait, or stays
      in an ``except`` block that handles a backward pass that failed before the engine took part in it, or what came of
      that, or in the hook of an exception that ended the script (a debugger);
    - on a rank that waits outside the engine (in a barrier of the script) while all others wait too; where a call moves
      data, once no connection has carried any for ``stopped_after`` seconds;
    - on a rank that waits for one that has not answered for ``stopped_after`` seconds, and whose process has not run in
      that time by what ranks of its host see: it, or its host, is stopped.

    ``store`` is the thread's own connection: one that the script waits in answers nobody else. ``carried()`` returns
    the bytes that this process's connections for data have carried, None if that is not known. ``note(reason)`` leaves
    a reason for ranks that will wait for this one, without giving up.
    """

    def __init__(
        self,
        watched: Watched,
        store: Store,
        rank: int,
        world_size: int,
        give_up: Callable[[str], None],
        note: Callable[[str], None],
        *,
        carried: Callable[[], int | None],
        stopped_after: float,
    ) -> None:
        self._watched = watched
        self._store = store
        self._carried = carried
        self._process = own_process()
        self._processes: dict[int, Process] = {}
        self._ticks: dict[int, int | None] = {}
        self._ran: dict[int, float] = {}
        if self._process is not None:
            store.set(f"process {rank}", json.dumps(asdict(self._process)))
        self._rank, self._world_size = rank, world_size
        self._give_up = give_up
        self._note = note
        self._stopped_after = stopped_after
        self._ended = threading.Event()
        self._beat = 0
        self._has_asked = self._has_logged = False
        self._seen: dict[int, tuple[Heartbeat | None, float]] = {}
        self._steady: dict[int, tuple[tuple[Any, ...], float]] = {}
        self._looked = 0.0
        self._handled: tuple[int, float] | None = None
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._ended), daemon=True, name="zero-watch"
        )
        self._at_exit = _exit_handler(weakref.ref(self))
        atexit.register(self._at_exit)
        weakref.finalize(self, self._ended.set).atexit = False
        self._thread.start()

    def end(self) -> None:
        """Stop the thread, waiting up to 2 s for it. May be called by any thread, this one included. Does nothing if it
        was called before."""
        self._ended.set()
        atexit.unregister(self._at_exit)
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)  # the store may not answer any more

    def note_script_end(self, error: BaseException | None) -> None:
        """Leave a note (``note``) for ranks that will wait for this one: its script has ended, by ``error`` or, if that
        is None, normally."""
        done = self._watched
        if error is None:
            self._note(f"ended its script; its last call was {done.last}, after {done.micro_batches} micro-batches")
        else:
            self._note(f"failed: {describe_failure(error)}")

    def check(self) -> None:
        """Look once: ask for heartbeats if this rank waits, write its own if a rank asked, and log or give up as [Note:
        the watch] says. Also have the flight recorder look at the device. The thread calls it every half second.

        Raises RuntimeError when the store is gone.
        """
        recorder = process_recorder()
        if recorder is not None:
            recorder.look_at_device()
        now = time.monotonic()
        waiting = self._watched.waiting
        if waiting is not None and now - waiting[1] >= _ASK_AFTER:
            self._store.set("asked", str(self._rank))
            self._has_asked = True
        elif self._has_asked:
            self._has_asked = self._has_logged = False
            self._store.delete_key("asked")
        if not self._has_asked and not self._store.check(["asked"]):
            for found in (self._seen, self._steady, self._ticks, self._ran):
                found.clear()
            return
        self._write_heartbeat(now)
        failed = self._own_failure(now)
        if failed is not None and not self._has_asked and now - failed[1] >= _FAILED_FOR:
            self._give_up(f"failed: {failed[0]}; it made no further call while others waited for it")
            self._ended.set()
            return
        if now - self._looked >= _TICK * self._world_size / _PEERS_PER_TICK:
            self._looked = now
            self._read_heartbeats(now)
            self._log_or_give_up(now, waiting)

    def _own_failure(self, now: float) -> tuple[str, float] | None:
        """Return (why this rank failed, since when) if a call or a backward pass of it failed and it has made no call
        since; else None.

        A backward pass that the script ran itself counts while the main thread handles its exception, unless it did so
        already when the latest call began.
        """
        failed = failed_backward()
        if self._watched.failed is not None or failed is None or id(failed[0]) in self._watched.excused:
            self._handled = None
            return self._watched.failed
        cause = failed[1]
        if self._handled is None or self._handled[0] != id(cause):
            self._handled = id(cause), now
        return describe_failure(cause, "in a backward pass of the script"), self._handled[1]

    def _write_heartbeat(self, now: float) -> None:
        """Store this rank's `Heartbeat`, by which it answers the ranks that ask, under the key `report RANK`."""
        self._beat += 1
        waiting = self._watched.waiting
        place = CodePlace("", False, False) if waiting is not None else place_of_main_thread()
        stuck = waiting[2] if waiting is not None else place.waits
        report = Heartbeat(
            self._beat,
            "" if waiting is None else str(waiting[0]),
            f"{place}{_OWES_BACKWARD if self._watched.owes_backward else ''}",
            stuck,
            str(self._watched.last),
            self._watched.micro_batches,
            self._carried() if not stuck and (waiting is not None or place.in_call) else None,
            tuple(rank for rank in self._seen if self._has_run(rank, now)),
        )
        self._store.set(f"report {self._rank}", json.dumps(asdict(report)))

    def _has_run(self, rank: int, now: float) -> bool:
        """Return whether ``rank``, which has not answered for half a second, is a process of this host that has used
        processor time since this was last called for it; False at the first call, for a rank of another host, and where
        that is not known."""
        key = f"process {rank}"
        if self._process is None or now - self._seen[rank][1] < _TICK:
            return False
        if rank not in self._processes and self._store.check([key]):
            self._processes[rank] = Process(**json.loads(self._store.get(key)))
        process = self._processes.get(rank)
        if process is None or process.place != self._process.place:
            return False
        before, ticks = self._ticks.get(rank), processor_ticks(process)
        self._ticks[rank] = ticks
        return before is not None and ticks is not None and ticks > before

    def _read_heartbeats(self, now: float) -> None:
        """Read every rank's heartbeat from the store, and keep when each has last changed and since when its rank has
        been at one place."""
        for rank in range(self._world_size):
            key = f"report {rank}"
            report = Heartbeat(**json.loads(self._store.get(key))) if self._store.check([key]) else None
            before = self._seen.get(rank)
            if before is None or (report is not None and (before[0] is None or report.beat != before[0].beat)):
                self._seen[rank] = report, now
                self._ran.update(dict.fromkeys(() if report is None else report.running, now))
            if report is not None:
                place = (report.waits, report.where, report.stuck, report.last, report.carried)
                if rank not in self._steady or self._steady[rank][0] != place:
                    self._steady[rank] = place, now

    def _log_or_give_up(self, now: float, waiting: tuple[object, float, bool] | None) -> None:
        """Give up or log, by the heartbeats that were read, as [Note: the watch] says; giving up ends the thread.
        ``waiting``: `Watched.waiting` of this rank, None if it does not wait."""
        for rank, (_, answered) in self._seen.items():
            since = max(answered, self._ran.get(rank, answered))
            if waiting is not None and rank != self._rank and now - since >= self._stopped_after:
                self._give_up(
                    f"waited at {waiting[0]} for rank {rank}, which has not answered for {now - since:.0f} s: its "
                    "process or its host is stopped or cannot be reached"
                )
                self._ended.set()
                return
        if waiting is not None and not self._has_logged and now - waiting[1] >= _NAME_AFTER:
            self._has_logged = True
            logger.warning(
                "rank %d has waited %.0f s at %s, for %s. The ranks:\n%s",
                self._rank,
                now - waiting[1],
                waiting[0],
                self._describe_awaited(),
                self._describe_ranks(),
            )
        if waiting is None and self._all_stuck(now):
            reason = f"the ranks wait for one another and none continues:\n{self._describe_ranks()}\n{_ADVICE}"
            logger.error("%s", reason)
            self._give_up(f"left the others: {reason}")
            self._ended.set()

    def _all_stuck(self, now: float) -> bool:
        """Return whether no rank can continue: all answer, and each has waited at one place, for other ranks (for 3 s)
        or for data of which none moved (for ``stopped_after`` seconds)."""
        if len(self._steady) < self._world_size or any(now - since >= _STUCK_FOR for _, since in self._seen.values()):
            return False
        patience = max(self._stopped_after, _STUCK_FOR)
        return all(
            now - since >= (_STUCK_FOR if stuck else patience) and (stuck or carried is not None)
            for (_, _, stuck, _, carried), since in self._steady.values()
        )

    def _describe_awaited(self) -> str:
        """Return words for a log about whom this rank waits for: the ranks that do not wait themselves, as "ranks 1,
        2", or "one another" if all wait."""
        late = [str(rank) for rank, (report, _) in sorted(self._seen.items()) if report is None or not report.waits]
        return f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}" if late else "one another"

    def _describe_ranks(self) -> str:
        """Return a text with a line for each rank: where it is, or for how long it has not answered."""
        lines = []
        for rank, (report, since) in sorted(self._seen.items()):
            silent = time.monotonic() - since
            if report is None or silent >= _STUCK_FOR:
                runs = ", but its process runs" if rank in self._ran else ""
                lines.append(f"  rank {rank}: no answer for {silent:.0f} s{runs}")
            else:
                lines.append(f"  rank {rank}: {report}")
        return "\n".join(lines)


_ADVICE = (
    "Every rank must run the same number of micro-batches and steps, and make the engine's calls and those of "
    "torch.distributed in the same order."
)


def _run(reference: weakref.ref[Watch], ended: threading.Event) -> None:
    """Have the watch of ``reference`` check every half second, until ``ended`` is set, the watch is deleted or the
    store is gone; the thread's function."""
    while not ended.wait(_TICK) and _check(reference):
        pass


def _check(reference: weakref.ref[Watch]) -> bool:
    """Have the watch of ``reference`` check once; return False when it is deleted or the store is gone. Afterwards
    nothing here keeps the watch alive."""
    watch = reference()
    if watch is None:
        return False
    try:
        watch.check()
    except RuntimeError as error:  # the store went with the rank that kept it, and connections tell the rest
        logger.debug("the watch ends: %s", error)
        return False
    return True


def _exit_handler(reference: weakref.ref[Watch]) -> Callable[[], None]:
    """Return the function that atexit calls for the watch of ``reference``: it leaves a note for ranks that may wait,
    and ends the thread.

    In a forked process it does nothing, as that is no rank and shares the rank's connection to the store.
    """
    process = os.getpid()

    def at_exit() -> None:
        """Leave the note and end the watch, if that still exists and this process is not a fork."""
        watch = reference()
        if watch is not None and os.getpid() == process:
            watch.note_script_end(getattr(sys, "last_value", None))
            watch.end()

    return at_exit
