"""Run a function on several ranks from one test process."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_PRELOADED = ["torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
"""Modules that the fork server imports once for all workers. The last three cost each worker a second otherwise:
torch imports them when a first optimizer is made."""


class RanksFailedError(RuntimeError):
    """One or more ranks raised. The message holds their tracebacks.

    ``failures``: rank -> traceback as text; also an attribute.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))


class _Pool:
    """Worker processes that stay alive between calls of `run_ranks`.

    New workers are forked by a server that has imported torch and the modules that packages declare, as these imports
    take seconds. They see the environment as it was when the first one was made. They share one TCPStore, whose
    clients learn of a key at once; those of a FileStore poll every 10 ms, several times for each group.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, *_declared_modules()])
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = itertools.count()

    def next_prefix(self) -> str:
        """Return a prefix for the store's keys of one call of `run_ranks` that no earlier call has used."""
        return f"call {next(self._calls)}"

    def get_workers(self, count: int) -> list[tuple[BaseProcess, Connection]]:
        """Return the processes of ranks 0 to ``count`` - 1, each with this process's end of the connection to it; start
        those that are missing."""
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self._workers[:count]

    def close(self) -> None:
        """Kill all workers; the next `get_workers` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()


def _declared_modules() -> list[str]:
    """Return the names of the modules that imported modules list in their ``__import_ahead__``: they may be imported
    ahead of time. zero-launch reads the same lists."""
    loaded = list(sys.modules.values())
    return [name for module in loaded for name in vars(module).get("__import_ahead__", ())]


@functools.cache
def _pool() -> _Pool:
    """Return this process's pool of workers, which is closed at exit."""
    pool = _Pool()
    atexit.register(pool.close)
    return pool


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` in ``world_size`` processes with torch.distributed (gloo) initialised, and return the results
    in rank order.

    ``fn``, ``args`` and the results must be picklable (``fn``: a function at module level). Workers run torch with one
    thread, each on a core of its own if there are exactly as many cores, and are reused: what a call changes in its
    process stays, except after an exception, which ends all workers. Raises `RanksFailedError` with the tracebacks of
    all ranks that raised, and TimeoutError when no rank has answered for ``timeout`` seconds.
    """
    pool = _pool()
    workers = pool.get_workers(world_size)
    prefix = pool.next_prefix()
    try:
        for rank, (_, connection) in enumerate(workers):
            connection.send((fn, args, rank, world_size, prefix))
        results, failures = _collect_answers([connection for _, connection in workers], timeout)
        if failures:
            raise RanksFailedError(failures)
    except BaseException:  # also what a test's own time limit raises: workers may be in the middle of the call
        pool.close()
        raise
    return [results[rank] for rank in range(world_size)]


def _collect_answers(connections: list[Connection], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait until all ranks have answered; return (results of the ranks that returned, tracebacks of those that raised),
    both by rank. ``connections``: to the ranks' processes, in rank order. Raises TimeoutError when no rank has answered
    for ``timeout`` seconds."""
    results: dict[int, Any] = {}
    failures: dict[int, Any] = {}
    pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
    while pending:
        ready = wait(list(pending), timeout)
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(pending.values())} gave no answer in {timeout:.0f} s"
                + "".join(f"\n--- rank {r} ---\n{t}" for r, t in sorted(failures.items()))
            )
        for answered in ready:
            rank = pending.pop(answered)
            try:
                ok, value = answered.recv()  # type: ignore[union-attr, call-arg]
            except EOFError:
                ok, value = False, "the process ended without an answer"
            (results if ok else failures)[rank] = value
    return results, failures


def _serve(connection: Connection, port: int) -> None:
    """Run the calls that the pool sends over ``connection`` and send back (True, result) or (False, traceback), until
    the pool closes it; a worker's main function. ``port``: of the pool's TCPStore."""
    torch.set_num_threads(1)
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # no rank leaves a new group while another still connects
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gc.freeze()  # what torch's import has made stays; looking through it would make every collection slow
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        try:
            connection.send((True, _run_call(call, store, cores)))
        except BaseException:  # every failure goes back to the caller with its traceback, unpicklable results too
            connection.send((False, traceback.format_exc()))
        gc.collect()  # reference cycles of the call hold process groups, whose threads wake 100 times a second
        gc.freeze()  # what is left are imports and caches, which stay


def cores_of(rank: int, world_size: int, cores: Sequence[int]) -> Sequence[int]:
    """Return those of ``cores`` that ``rank`` of ``world_size`` runs on: one of its own if there are exactly as many
    cores as ranks, else all.

    gloo's thread finds the lock of a connection taken while the rank's own thread sends, and tries again and again
    until the lock is free. On the rank's core it sleeps meanwhile, and the rank takes a third less processor time.
    """
    return [cores[rank]] if world_size == len(cores) else cores


def _run_call(call: bytes, store: Store, cores: Sequence[int]) -> Any:
    """Return the result of one pickled ``call``: (function, arguments, rank, world size, prefix of its keys in
    ``store``).

    torch.distributed is initialised for the call and destroyed after it. ``cores``: those that this process may run on;
    empty where the system does not say. Raises what the function raises.
    """
    fn, args, rank, world_size, prefix = pickle.loads(call)
    if cores:
        os.sched_setaffinity(0, cores_of(rank, world_size, cores))
    dist.init_process_group("gloo", store=PrefixStore(prefix, store), rank=rank, world_size=world_size)
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()
