"""Destroy process groups, at the latest when the interpreter begins to shut down."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist


class Closable(Protocol):
    """The holder of a process group, which `close_at_exit` closes."""

    def close(self) -> None:
        """Destroy the process group; do nothing if that was done before."""


def destroy_group(process_group: dist.ProcessGroup, process: int | None = None) -> None:
    """Destroy ``process_group``; do nothing if the script has destroyed all groups already, or in a process that was
    forked from the group's own. ``process``: the id of the process that opened the group; None for this one."""
    if process not in (None, os.getpid()):
        return
    keep_where_forked().add(process_group)
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group(process_group)


@functools.cache
def keep_where_forked() -> weakref.WeakSet[dist.ProcessGroup]:
    """Return the set of destroyed process groups that a forked process must keep; a caller adds those that it destroys.
    Every call returns the same set, which holds its members weakly.

    The first call has every process that is forked from this one later keep the groups in the set, and all groups that
    torch knows, until that process ends: nothing frees them there, not even the interpreter's end. Destroyed groups
    count, as code may still hold them. See [Note: threads at the end] in `close_at_exit`.
    """
    destroyed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    def keep() -> None:
        """Add to each group a reference that nothing removes; called in the child right after a fork."""
        for group in {*destroyed, *dist.distributed_c10d._world.pg_map}:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    os.register_at_fork(after_in_child=keep)
    return destroyed


def close_at_exit(holder: Closable) -> Callable[[], None]:
    """Have ``holder.close()`` called when the interpreter begins to shut down, if ``holder`` still exists; return a
    function that cancels this.

    [Note: threads at the end] gloo's threads may still release tensors, for which they need the interpreter's lock. A
    thread that asks for the lock while the interpreter shuts down is ended on the spot, and the C++ runtime aborts the
    process ("terminate called without an active exception"). So the threads are joined before that. If the process ends
    by an exception they are not: one of them may wait for a peer that waits for this process to end.

    A process that was forked from this one has none of the threads, so there a group can never be destroyed: its
    destructor would wait for them for ever. `keep_where_forked` lets it live as long as the process.
    """
    keep_where_forked()
    reference, process = weakref.ref(holder), os.getpid()

    def close() -> None:
        """Close the holder, unless the process ends by an exception or is a forked one."""
        alive = reference()
        ends_by_an_exception = hasattr(sys, "last_value")
        if alive is not None and not ends_by_an_exception and os.getpid() == process:
            alive.close()

    atexit.register(close)
    forget = weakref.finalize(holder, atexit.unregister, close)
    forget.atexit = False
    return forget
