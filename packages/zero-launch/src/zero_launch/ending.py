"""The last step of a rank before its interpreter shuts down: wait until the threads of its process groups are idle.

[Note: gloo's threads at the end] A thread of gloo's drops the tensors of a collective after it has told the script
that the collective is done. For that it needs the interpreter's lock. A thread that waits for the lock when the
interpreter begins to be taken down is ended on the spot, inside a C++ destructor, and the C++ runtime aborts the
process ("terminate called without an active exception"). Threads that ask for it later do without. So nothing may wait
for the lock at that moment.

Groups of a script that ended without an exception are destroyed, which joins their threads. The interpreter does the
same a moment later, so nothing is waited for that would not be waited for anyway. A script that keeps references to
its groups keeps their threads too, and after an exception nobody is waited for: such threads get the lock until none of
them moves.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_SECONDS = 1.0
_COUNTED = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
logger = logging.getLogger(__name__)


def end_process_groups() -> None:
    """Destroy gloo's process groups that the script left, and wait up to 1 s until their remaining threads are idle.

    After an uncaught exception, which sets `sys.last_value`, no group is destroyed. Does nothing if torch.distributed
    was not imported; never raises. See [Note: gloo's threads at the end].
    """
    if "torch.distributed" not in sys.modules:
        return
    import torch.distributed as dist

    ends_by_an_exception = hasattr(sys, "last_value")
    if not ends_by_an_exception and dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        try:
            dist.destroy_process_group()
        except Exception as error:  # the script has ended, and its status is what counts
            logger.warning("the process groups could not be destroyed at the end of the script: %s", error)
    _await_idle_threads(time.monotonic() + _SECONDS)


def _await_idle_threads(deadline: float) -> None:
    """Sleep, so that gloo's threads get the interpreter's lock, until all of them are idle, at most until ``deadline``
    (`time.monotonic`)."""
    before = _gloo_threads()
    while before and time.monotonic() < deadline:
        time.sleep(2 * sys.getswitchinterval())  # one that waits for the lock looks again in this time
        after = _gloo_threads()
        if after == before and all("S (sleeping)" in counted for counted in after.values()):
            return
        before = after


def _gloo_threads() -> dict[str, str]:
    """Return thread id -> its state and numbers of context switches as text, for this process's gloo threads.

    Where gloo's threads have no name of their own, any thread that is not Python's is taken for one.
    """
    from .compat import gloo_thread_names

    names = gloo_thread_names(Path("/proc/self/comm").read_text().strip())
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    threads = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name in of_python:
            continue
        with suppress(OSError):  # a thread that ended meanwhile
            if (task / "comm").read_text().strip() in names:
                lines = (task / "status").read_text().splitlines()
                threads[task.name] = " ".join(line for line in lines if line.startswith(_COUNTED))
    return threads
