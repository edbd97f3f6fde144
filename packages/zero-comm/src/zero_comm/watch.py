"""A thread beside training that says which rank is missed, and frees the ranks that would wait for ever."""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from .stacks import CodePlace, failed_backward, place_of_main_thread
from .watched import Watched

logger = logging.getLogger("zero_comm")

_TICK = 0.5  # seconds between two looks at the store
_ASK_AFTER = 1.0  # seconds of waiting after which a rank asks the others where they are
_NAME_AFTER = 5.0  # seconds of waiting after which the log says for whom
_FAILED_FOR = 2.0  # seconds that others wait for a rank that failed and makes no further call
_STUCK_FOR = 3.0  # seconds that all ranks have to wait for one another
_PEERS_PER_TICK = 32  # bounds the load on the store, which matters only while ranks wait


@dataclass(frozen=True)
class Heartbeat:
    """Says where one rank is. ``beat``: counts its heartbeats. ``waits``: the message it waits with, else empty.
    ``where``: what its main thread does outside this package. ``stuck``: that is a wait for other ranks. ``last``: its
    last call that all ranks took part in. ``micro_batches``: how many it has counted."""

    beat: int
    waits: str
    where: str
    stuck: bool
    last: str
    micro_batches: int

    def __str__(self) -> str:
        now = f"waits at {self.waits}" if self.waits else self.where
        return f"{now}; its last call was {self.last}, after {self.micro_batches} micro-batches"


class Watch:
    """Looks into ``store`` twice a second, and does nothing else while no rank has waited for a second.

    [Note: the watch] A rank that waits longer asks for `Heartbeat`s. The ranks answer from this thread, so a slow one
    that computes answers and is left alone. ``give_up(reason)`` is called, from this thread, where waiting has no end:
    by a rank that failed, was caught, and makes no further call while others wait (or stays in the ``except`` block
    of a backward pass that failed before the engine had a part in it); by one that waits outside the
    engine (in a barrier of the script) while all others wait; and by a rank that waits for one that has not
    answered for ``stopped_after`` seconds: its process is stopped, or its host. ``note(reason)`` leaves a reason for
    ranks that miss this one, without giving up.
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
        stopped_after: float,
    ) -> None:
        self._watched = watched
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._give_up = give_up
        self._note = note
        self._stopped_after = stopped_after
        self._ended = threading.Event()
        self._beat = 0
        self._asked = self._named = False
        self._seen: dict[int, tuple[Heartbeat | None, float]] = {}
        self._steady: dict[int, tuple[tuple[Any, ...], float]] = {}
        self._looked = 0.0
        self._handled: tuple[int, float] | None = None
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._ended), daemon=True, name="zero-watch"
        )
        self._at_exit = _ending(weakref.ref(self))
        atexit.register(self._at_exit)
        weakref.finalize(self, self._ended.set).atexit = False
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        atexit.unregister(self._at_exit)
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)  # the store may not answer any more

    def say_goodbye(self, error: BaseException | None) -> None:
        """Leave a note for the ranks that may wait: the script of this one has ended, by ``error`` or without."""
        done = self._watched
        if error is None:
            self._note(f"ended its script; its last call was {done.last}, after {done.micro_batches} micro-batches")
        else:
            self._note(f"failed: {type(error).__name__}: {error}")

    def look(self) -> None:
        """One look; RuntimeError when the store is gone."""
        now = time.monotonic()
        waiting = self._watched.waiting
        if waiting is not None and now - waiting[1] >= _ASK_AFTER:
            self._store.set("asked", str(self._rank))
            self._asked = True
        elif self._asked:
            self._asked = self._named = False
            self._store.delete_key("asked")
        if not self._asked and not self._store.check(["asked"]):
            self._seen.clear()
            self._steady.clear()
            return
        self._answer()
        failed = self._failure(now)
        if failed is not None and not self._asked and now - failed[1] >= _FAILED_FOR:
            self._give_up(f"failed: {failed[0]}; it made no further call while others waited for it")
            self._ended.set()
            return
        if now - self._looked >= _TICK * self._world_size / _PEERS_PER_TICK:
            self._looked = now
            self._read(now)
            self._judge(now, waiting)

    def _failure(self, now: float) -> tuple[str, float] | None:
        """Return why this rank makes no call, and since when, if it failed."""
        failure = failed_backward()
        if self._watched.failed is not None or failure is None or id(failure) == self._watched.excused:
            self._handled = None
            return self._watched.failed
        if self._handled is None or self._handled[0] != id(failure):
            self._handled = id(failure), now
        return f"{type(failure).__name__}: {failure} (in a backward pass of the script)", self._handled[1]

    def _answer(self) -> None:
        self._beat += 1
        waiting = self._watched.waiting
        place = CodePlace("", waits=False) if waiting is not None else place_of_main_thread()
        report = Heartbeat(
            self._beat,
            "" if waiting is None else str(waiting[0]),
            str(place),
            waiting[2] if waiting is not None else place.waits,
            str(self._watched.last),
            self._watched.micro_batches,
        )
        self._store.set(f"report {self._rank}", json.dumps(asdict(report)))

    def _read(self, now: float) -> None:
        for rank in range(self._world_size):
            key = f"report {rank}"
            report = Heartbeat(**json.loads(self._store.get(key))) if self._store.check([key]) else None
            before = self._seen.get(rank)
            if before is None or (report is not None and (before[0] is None or report.beat != before[0].beat)):
                self._seen[rank] = report, now
            if report is not None:
                place = (report.waits, report.where, report.stuck, report.last)
                if rank not in self._steady or self._steady[rank][0] != place:
                    self._steady[rank] = place, now

    def _judge(self, now: float, waiting: tuple[object, float, bool] | None) -> None:
        for rank, (_, since) in self._seen.items():
            if waiting is not None and rank != self._rank and now - since >= self._stopped_after:
                self._give_up(
                    f"waited at {waiting[0]} for rank {rank}, which has not answered for {now - since:.0f} s: its "
                    "process or its host is stopped or cannot be reached"
                )
                self._ended.set()
                return
        if waiting is not None and not self._named and now - waiting[1] >= _NAME_AFTER:
            self._named = True
            logger.warning(
                "rank %d has waited %.0f s at %s. The others:\n%s",
                self._rank,
                now - waiting[1],
                waiting[0],
                self._listing(),
            )
        if waiting is None and self._all_stuck(now):
            reason = f"the ranks wait for one another and none goes on:\n{self._listing()}\n{_ADVICE}"
            logger.error("%s", reason)
            self._give_up(f"left the others: {reason}")
            self._ended.set()

    def _all_stuck(self, now: float) -> bool:
        steady = len(self._steady) == self._world_size and all(
            place[2] and now - since >= _STUCK_FOR for place, since in self._steady.values()
        )
        return steady and all(now - since < _STUCK_FOR for _, since in self._seen.values())

    def _listing(self) -> str:
        lines = []
        for rank, (report, since) in sorted(self._seen.items()):
            silent = time.monotonic() - since
            if report is None or silent >= _STUCK_FOR:
                lines.append(f"  rank {rank}: no answer for {silent:.0f} s")
            else:
                lines.append(f"  rank {rank}: {report}")
        return "\n".join(lines)


_ADVICE = (
    "Every rank must run the same number of micro-batches and steps, and make the engine's calls and those of "
    "torch.distributed in the same order."
)


def _run(reference: weakref.ref[Watch], ended: threading.Event) -> None:
    while not ended.wait(_TICK) and _look(reference):
        pass


def _look(reference: weakref.ref[Watch]) -> bool:
    """Have the watch look, if it is still there; whether to go on. Nothing holds the watch between two looks."""
    watch = reference()
    if watch is None:
        return False
    try:
        watch.look()
    except RuntimeError as error:  # the store went with the rank that kept it, and connections tell the rest
        logger.debug("the watch ends: %s", error)
        return False
    return True


def _ending(reference: weakref.ref[Watch]) -> Callable[[], None]:
    """Tell the ranks that may wait, and end the thread of a watch; called when the interpreter begins to end."""

    def at_exit() -> None:
        watch = reference()
        if watch is not None:
            watch.say_goodbye(getattr(sys, "last_value", None))
            watch.end()

    return at_exit
