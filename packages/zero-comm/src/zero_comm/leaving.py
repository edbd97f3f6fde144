"""Give process groups back, at the latest when the interpreter is about to end."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist


class Closable(Protocol):
    """The holder of a process group."""

    def close(self) -> None: ...


def leave(process_group: dist.ProcessGroup) -> None:
    """Destroy ``process_group``; nothing where the script has destroyed all groups already."""
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group(process_group)


def close_at_exit(holder: Closable) -> Callable[[], None]:
    """Have ``holder`` closed when the interpreter begins to end, if it is still there; the result takes that back.

    [Note: threads at the end] gloo's threads may still let go of tensors, for which they need the interpreter's lock. A
    thread that asks for it when the interpreter is being taken down is ended on the spot, and the C++ runtime aborts
    the process ("terminate called without an active exception"). So the threads are joined before that; unless the
    process ends by an exception, when one of them may wait for a peer that waits for this process to end.
    """
    reference = weakref.ref(holder)

    def close() -> None:
        alive = reference()
        ends_by_an_exception = hasattr(sys, "last_value")
        if alive is not None and not ends_by_an_exception:
            alive.close()

    atexit.register(close)
    forget = weakref.finalize(holder, atexit.unregister, close)
    forget.atexit = False
    return forget
