"""The TCP connections of process groups, to be cut when this rank gives up."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """Remembers the sockets that are opened inside `recording`; `sever` cuts them.

    [Note: severing] gloo offers no way to interrupt a wait, and a group's connections stay open after it was destroyed
    as long as a send or a receive is pending on it. A rank that gives up in the middle of a pass has pending ones, and
    its process may live on in a debugger. So it shuts its sockets down: gloo reports that to whoever waits, here and on
    the other side, as a closed connection. Sockets go by inode, because descriptors are used again. Where the system
    has no /proc, nothing is recorded, and peers wait for the end of the process.
    """

    def __init__(self) -> None:
        self._inodes: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Remember the sockets that are opened inside and are still open at the end."""
        before = set(_sockets())
        yield
        self._inodes |= set(_sockets()) - before

    def sever(self) -> int:
        """Shut the connections down, those that are still open; return their number. May be called by any thread."""
        count = 0
        for inode, descriptor in _sockets().items():
            if inode in self._inodes:
                count += _shut_down(descriptor, inode)
        self._inodes.clear()
        return count


def _sockets() -> dict[int, int]:
    """The descriptor of every open socket, by inode."""
    found = {}
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(entry).partition(":")
            if kind == "socket":
                found[int(inode.strip("[]"))] = int(entry.name)
    return found


def _shut_down(descriptor: int, inode: int) -> bool:
    """Shut a connected socket down; listening ones stay as they are, for gloo aborts the process without them."""
    with suppress(OSError):
        held = socket.socket(fileno=os.dup(descriptor))
        with held:
            if os.fstat(held.fileno()).st_ino == inode:
                held.getpeername()
                held.shutdown(socket.SHUT_RDWR)
                return True
    return False
