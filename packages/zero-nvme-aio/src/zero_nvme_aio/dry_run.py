"""An engine for dry runs that moves no bytes: files get their lengths, and every request ends at once. A described
buffer is memory as `_buffers` returns it: a flat memoryview of bytes, or (address, bytes, owner).
"""

from __future__ import annotations

import os

from . import _buffers
from ._engine import Engine
from ._file import File, require_offset
from ._request import Request, format_checksum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["DryRunEngine"]

_CHECKSUM = format_checksum(0)


class DryRunEngine(Engine):
    """Stands in for an `Engine` in a dry run: no memory is read or written, no disk space is taken.

    A file that is written gets its length but no content (a sparse file). All checksums are equal. `counters()` has
    ``bytes_read`` and ``bytes_written``. Extent stores over it allocate and index as usual.
    """

    def __init__(self) -> None:
        self._tuned = False
        self._read = self._written = 0
        self._lengths: dict[str, int] = {}

    def sibling(self) -> DryRunEngine:
        """Return this engine itself, also for files on other drives: it counts the bytes of all drives together."""
        return self

    @property
    def backend(self) -> str:
        """Return "dry-run"."""
        return "dry-run"

    @property
    def closed(self) -> bool:
        """Return False: there is nothing to close."""
        return False

    def open(
        self, path: str | os.PathLike[str], mode: str = "r", *, direct: bool | str = "auto", preallocate: bool = True
    ) -> File:
        """Open a file without content: "r" (must exist), "w" (created or emptied), "rw" (created if missing). `direct`
        and `preallocate` are ignored. OSError if it cannot be opened.
        """
        name = os.fspath(path)
        if mode != "r":
            descriptor = os.open(name, os.O_CREAT | os.O_WRONLY | (os.O_TRUNC if mode == "w" else 0), 0o600)
            os.close(descriptor)
        self._lengths[name] = os.stat(name).st_size
        return _DryRunFile(name, mode)

    def submit_items(self, write: bool, file: File, items: list[Any], offset: int, checksum: bool) -> Request:
        """Count the bytes of described buffers (`_buffers.describe_all`) as read, or with `write` as written, and
        return a request that has ended. A write extends the file, which stays sparse, to its end. `checksum`: give the
        request a constant checksum. InvalidOffsetError for an impossible offset.
        """
        nbytes = sum(map(_buffers.nbytes_of, items))
        require_offset(file.path, offset, nbytes)
        if write:
            self._written += nbytes
            if offset + nbytes > self._lengths[file.path]:
                self._lengths[file.path] = offset + nbytes
                os.truncate(file.path, offset + nbytes)
        else:
            self._read += nbytes
        return _EndedRequest(nbytes, checksum)

    def sync(self, file: File) -> None:
        """Do nothing: no content was written."""

    def counters(self) -> dict[str, int]:
        """Return the bytes that would have been moved so far, as ``bytes_read`` and ``bytes_written``."""
        return {"bytes_read": self._read, "bytes_written": self._written}

    def lengths(self) -> dict[str, int]:
        """Return the bytes of each file that was opened and still exists, by path."""
        return {path: os.stat(path).st_size for path in self._lengths if os.path.exists(path)}

    def close(self) -> None:
        """Do nothing: no request is under way."""

    def __repr__(self) -> str:
        return f"<DryRunEngine of {len(self._lengths)} files>"


class _DryRunFile(File):
    """A `File` of a dry run: a path, a mode, and the length of the file on disk; no descriptor is open."""

    __slots__ = ()

    def __init__(self, path: str, mode: str) -> None:
        self.path = path
        self.mode = mode

    @property
    def closed(self) -> bool:
        """Return False: a dry run's file holds nothing that is to be closed."""
        return False

    @property
    def size(self) -> int:
        """Return the present size of the sparse file in bytes."""
        return os.stat(self.path).st_size

    def close(self) -> None:
        """Do nothing: no descriptor is open."""

    def __repr__(self) -> str:
        return f"<File '{self.path}' mode '{self.mode}', dry-run>"


class _EndedRequest(Request):
    """A `Request` of a dry run for `nbytes`, which has ended successfully: `wait` returns `nbytes` at once. With
    `checksum` its checksum is a constant, otherwise None.
    """

    __slots__ = ("_nbytes", "_summed")

    def __init__(self, nbytes: int, checksum: bool) -> None:
        self._nbytes = nbytes
        self._summed = checksum

    @property
    def nbytes(self) -> int:
        """Return the bytes that the request was for."""
        return self._nbytes

    @property
    def checksum(self) -> str | None:
        """Return a constant in place of the checksum if one was asked for, else None."""
        return _CHECKSUM if self._summed else None

    def done(self) -> bool:
        """Return True: it had ended when it was made."""
        return True

    def wait(self, timeout: float | None = None) -> int:
        """Return the number of bytes at once; `timeout` does not matter."""
        return self._nbytes

    def error(self) -> None:
        """Return None: no request of a dry run fails."""
        return None

    def times(self) -> tuple[int, int]:
        """Return (0, 0) as the times at which the request was submitted and ended."""
        return 0, 0

    def settle(self, timeout: float | None = None) -> bool:
        """Return True: the request has ended."""
        return True

    def cancel(self) -> None:
        """Do nothing: the request has ended."""

    def __repr__(self) -> str:
        return f"<Request of {self._nbytes} bytes, dry-run>"
