"""Run a function on ranks that have the simulated accelerator: in processes of their own, since torch asks for a
process's devices once."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from zero_comm.testing import cores_of

from . import BACKEND, NAME, configure, load, settle
from .build import library

_SECONDS = 120.0
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo"]
"""Modules that take seconds to import; torch imports the last one when a first optimizer is made."""


class _Pool:
    """Processes with the device that stay alive between calls."""

    def __init__(self) -> None:
        library()  # before the first rank asks for it; this process does not get the device
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)  # unless another pool's server runs already
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = itertools.count()

    def call(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> list[Any]:
        """Return what ``fn(*args)`` returns on each rank; raise RuntimeError with the tracebacks of those that fail."""
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        prefix = f"simulated {next(self._calls)}"
        for rank, (_, connection) in enumerate(self._workers[:world_size]):
            connection.send((fn, args, rank, world_size, prefix))
        answers = [self._answer(connection) for _, connection in self._workers[:world_size]]
        failures = [f"--- rank {rank} ---\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            self.close()
            raise RuntimeError("\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, connection: Connection) -> tuple[bool, Any]:
        try:
            if not connection.poll(_SECONDS):
                return False, f"no answer in {_SECONDS:.0f} s"
            answer: tuple[bool, Any] = connection.recv()
        except EOFError:
            return False, "the process ended without an answer"
        return answer

    def close(self) -> None:
        """Kill all workers; the next call starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()


@functools.cache
def _pool() -> _Pool:
    pool = _Pool()
    atexit.register(pool.close)
    return pool


def run_simulated(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` ranks with the simulated accelerator; return the results in rank order.

    torch.distributed is initialised with gloo and the device's backend. ``fn``, ``args`` and the results must be
    picklable. A rank whose device reports a failed operation fails.
    """
    return _pool().call(fn, world_size, args)


def _serve(connection: Connection, port: int) -> None:
    torch.set_num_threads(1)
    load()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    cores = sorted(os.sched_getaffinity(0))
    gc.freeze()  # what torch's import has made stays; looking through it would make every collection slow
    while True:
        try:
            fn, args, rank, world_size, prefix = connection.recv()
        except EOFError:
            return
        os.sched_setaffinity(0, cores_of(rank, world_size, cores))
        try:
            connection.send((True, _run(fn, args, PrefixStore(prefix, store), rank, world_size)))
        except BaseException:  # every failure goes back to the caller with its traceback
            connection.send((False, traceback.format_exc()))
        gc.collect()  # reference cycles of the call hold process groups, whose threads wake 100 times a second
        gc.freeze()  # what is left are imports and caches, which stay


def _run(fn: Callable[..., Any], args: tuple[Any, ...], store: dist.Store, rank: int, world_size: int) -> Any:
    configure(seed=0, longest_delay=200, raise_on_stop=False)
    dist.init_process_group(f"cpu:gloo,{NAME}:{BACKEND}", store=store, rank=rank, world_size=world_size)
    try:
        result = fn(*args)
        settle()
        return result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
