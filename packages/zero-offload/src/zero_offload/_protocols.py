"""Protocols of an extent store, which keeps named ranges of bytes (extents) in files. Each is named as the class of
zero-nvme-aio that satisfies it; nothing here imports those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Extent", "ExtentStore", "Generation", "PathUse", "Request"]


class Request(Protocol):
    """A transfer under way. Named as the class that satisfies it."""

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not; never blocks."""

    def wait(self, timeout: float | None = None) -> int:
        """Block until the transfer has ended; return the bytes moved or raise its error. TimeoutError if it has not
        ended after ``timeout`` seconds; None waits without end.
        """


class Extent(Protocol):
    """A range of a name's bytes in a file. Named as the class that satisfies it."""

    @property
    def path(self) -> str:
        """Return the path of the file."""

    @property
    def file_offset_bytes(self) -> int:
        """Return the offset in the file at which the range begins, in bytes."""

    @property
    def nbytes(self) -> int:
        """Return the length of the range in bytes."""

    @property
    def checksum(self) -> str:
        """Return the xxh3_64 of the range as text; empty while it is not sealed."""

    @property
    def offset_bytes(self) -> int:
        """Return the offset in the name's bytes at which the range begins."""

    @property
    def key(self) -> str:
        """Return the entry of the safetensors file that holds the range; empty if the file has another format."""


class Generation(Protocol):
    """The extents written between two seals; their files are never written again. Named as the class that satisfies
    it.
    """

    @property
    def index(self) -> int:
        """Return the number of the generation, counted from 1."""

    @property
    def extents(self) -> Mapping[str, tuple[Extent, ...]]:
        """Return the generation's extents by name, in the order of their offsets."""

    @property
    def files(self) -> tuple[str, ...]:
        """Return the paths of the generation's files."""

    @property
    def kind(self) -> str:
        """Return the format of the generation's files: "safetensors" or "raw"."""

    def release(self) -> None:
        """Allow the store to remove the files as soon as it does not need them itself; hard links to them stay."""

    def make_durable(self) -> None:
        """Sync the files, so that they survive a crash; callable from any thread, also twice. Raises the error of
        syncing.
        """


class PathUse(Protocol):
    """What a store has done with one of its folders. Named as the class that satisfies it."""

    @property
    def name(self) -> str:
        """Return what the folder is called in messages."""

    @property
    def share(self) -> float:
        """Return the folder's share of the bytes that the store writes from now on, from 0 to 1."""

    @property
    def state(self) -> str:
        """Return how the folder is used now: "in use", "full", "failed" or "slow"."""

    @property
    def bytes_written(self) -> int:
        """Return the bytes written to the folder so far."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes read from the folder so far."""

    @property
    def bytes_per_s(self) -> float:
        """Return the folder's rate of reading and writing together while it had transfers; 0 if it had none."""


class ExtentStore(Protocol):
    """Named byte ranges in files, in generations. Named as the class that satisfies it."""

    def declare(self, name: str, nbytes: int, dtype: str = "U8") -> None:
        """Fix the size and element type (in safetensors' spelling, such as "F32") of a name before it is written."""

    def write(self, name: str, data: Any, offset_bytes: int = 0) -> Request:
        """Start writing ``data``, host memory that must not change until the request has ended, at ``offset_bytes`` of
        the name, into the open generation; return the request. Waits for transfers of the same bytes.
        """

    def read(self, name: str, out: Any, offset_bytes: int = 0) -> Request:
        """Start reading into ``out``, host memory, from ``offset_bytes`` of the name, in the newest generation that
        holds the bytes; return the request. Waits for writes of the same bytes.
        """

    def seal(self, *, durable: bool = True) -> Generation:
        """End the open generation, which is never written again, and return it; it survives a crash only if
        ``durable``, or after its `make_durable`. Data of older generations may be carried over.
        """

    def carried_bytes(self) -> int:
        """Return the bytes of older generations that `seal` would copy now."""

    def extents(self) -> Mapping[str, tuple[Extent, ...]]:
        """Return the current extents of each name, over all generations."""

    def flush(self) -> None:
        """Wait for all submitted transfers; raise the first write that failed."""

    def bytes_written(self) -> int:
        """Return the bytes passed to `write` so far."""

    def path_use(self) -> Sequence[PathUse]:
        """Return a `PathUse` for each folder, in order: what was written to it and read from it so far, its speed and
        its state.
        """

    def former_paths(self) -> Sequence[str]:
        """Return the folders that an earlier store of this prefix had beside one of the present ones."""

    def close(self, *, remove: bool) -> None:
        """Close the store; with ``remove`` delete all its files, else only those that are not sealed."""
