"""Several ranks in one process: each is a thread, and they agree through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from zero_ckpt.plain import pack, unpack

T = TypeVar("T")


class ThreadCoordinator:
    """A coordinator for ranks that are threads; objects travel as msgpack, as they do between processes."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size = rank, world_size
        self._barrier, self._slots = barrier, slots

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._slots[self.rank] = pack(obj)
        self.barrier()
        gathered = [unpack(slot) for slot in self._slots]
        self.barrier()
        return gathered

    def barrier(self) -> None:
        self._barrier.wait(timeout=30)


def on_ranks(world_size: int, part: Callable[[ThreadCoordinator], T]) -> list[T | Exception]:
    """Run `part` on every rank; a rank's result is what it returned or the exception that it raised."""
    barrier, slots = threading.Barrier(world_size), [None] * world_size

    def run(rank: int) -> T | Exception:
        try:
            return part(ThreadCoordinator(rank, world_size, barrier, slots))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
