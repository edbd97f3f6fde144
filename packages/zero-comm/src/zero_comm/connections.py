"""The TCP connections of process groups, which a rank cuts when it gives up."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/proc/self/fd"


class Connections:
    """Remembers the sockets that are opened inside `recording`; `sever` cuts them.

    [Note: severing] gloo offers no way to interrupt a wait, and a destroyed group's connections stay open while a send
    or a receive is pending on it. A rank that gives up in the middle of a pass has pending operations, and its process
    may live on in a debugger. So it shuts its sockets down: gloo reports a closed connection to every waiting thread,
    here and on the other side. Sockets are identified by inode, because descriptor numbers are reused. Where the system
    has no /proc, nothing is recorded, and peers wait until the process ends.
    """

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        self._process = os.getpid()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the sockets that are opened inside the block and still open at its end, for `sever`; also if the block
        raises.

        Sockets that other threads open meanwhile are recorded too.
        """
        before = set(open_sockets())
        try:
            yield
        finally:
            self._inodes |= set(open_sockets()) - before

    def include(self, other: Connections) -> None:
        """Also cut, in `sever`, the connections that ``other`` has recorded so far."""
        self._inodes |= other._inodes

    def sever(self) -> int:
        """Shut down the recorded connections that are still open, and return their number; afterwards nothing is
        recorded.

        May be called by any thread. Does nothing in a process that was forked from the one that made this object:
        shutting the shared sockets down there would cut them here too.
        """
        if os.getpid() != self._process:
            return 0
        count = 0
        for inode, descriptor in open_sockets().items():
            if inode in self._inodes:
                count += _shut_down(descriptor, inode)
        self._inodes.clear()
        return count


def open_sockets() -> dict[int, int]:
    """Return the open sockets of this process: inode -> file descriptor. Empty where the system has no /proc."""
    found = {}
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _shut_down(descriptor: int, inode: int) -> bool:
    """Shut down the connected socket at file ``descriptor`` if it still has ``inode``, and return whether that was
    done.

    The descriptor stays open. Listening sockets stay as they are: gloo aborts the process without them.
    """
    with suppress(OSError):
        held = socket.socket(fileno=os.dup(descriptor))
        with held:
            if os.fstat(held.fileno()).st_ino == inode:
                held.getpeername()
                held.shutdown(socket.SHUT_RDWR)
                return True
    return False
