"""Protocols of an extent store, named as the classes of zero-nvme-aio that satisfy them; nothing here imports those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["Extent", "ExtentStore", "Generation", "Request"]


class Request(Protocol):
    """A transfer under way. Named as what satisfies it."""

    def done(self) -> bool:
        """Return whether it has ended, well or not."""

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended; return the bytes moved or raise its error."""


class Extent(Protocol):
    """A range of a name's bytes in a file. Named as what satisfies it."""

    @property
    def path(self) -> str: ...
    @property
    def file_offset_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def checksum(self) -> str: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def key(self) -> str: ...


class Generation(Protocol):
    """The extents written between two seals; their files are never written again. Named as what satisfies it."""

    @property
    def index(self) -> int: ...
    @property
    def extents(self) -> Mapping[str, tuple[Extent, ...]]: ...
    @property
    def files(self) -> tuple[str, ...]: ...
    @property
    def kind(self) -> str: ...

    def release(self) -> None:
        """Let the store remove the files once it needs them no more."""

    def make_durable(self) -> None:
        """Have it survive a crash; on any thread."""


class ExtentStore(Protocol):
    """Byte ranges with names, in files, in generations. Named as what satisfies it."""

    def declare(self, name: str, nbytes: int, dtype: str = "U8") -> None:
        """Say how large a name is before it is written."""

    def write(self, name: str, data: Any, offset_bytes: int = 0) -> Request:
        """Start writing into the open generation."""

    def read(self, name: str, out: Any, offset_bytes: int = 0) -> Request:
        """Start reading from the newest generation that holds the bytes."""

    def seal(self, *, durable: bool = True) -> Generation:
        """End the open generation, which is never written again; a crash it survives only if ``durable``."""

    def carried_bytes(self) -> int:
        """Bytes that `seal` would copy if it were called now."""

    def extents(self) -> Mapping[str, tuple[Extent, ...]]:
        """Return the extents that hold each name now, over all generations."""

    def flush(self) -> None:
        """Wait for everything submitted."""

    def bytes_written(self) -> int:
        """Bytes handed to `write` so far."""

    def close(self, *, remove: bool) -> None:
        """Close; with ``remove`` the files go."""
