"""A sealed generation of an extent store: its extents and files, and how long its files stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Extent", "Generation"]


@dataclass(frozen=True)
class Extent:
    """Bytes [offset_bytes, offset_bytes + nbytes) of a name, at `file_offset_bytes` of `path`.

    `checksum`: `"xxh3_64:<16 hex>"` of exactly these bytes; empty while unsealed, and for the rest of an extent that
    was partly overwritten. `key`: the entry (one dimension, of the dtype declared) if the file is a safetensors file
    and this is all of the entry, else empty.
    """

    path: str
    file_offset_bytes: int
    nbytes: int
    checksum: str
    offset_bytes: int
    key: str


@dataclass(frozen=True, eq=False)
class Generation:
    """The extents written between two seals; their files are never written again.

    `index`: its number, counted from 1. `extents`: name -> extents in order of offset, of this generation only
    (`ExtentStore.extents` returns the current state of all). `files`: the paths. `kind`: "safetensors" or "raw". While
    this object is alive its files stay in the store, so that they can be hard-linked. After `release()`, or when the
    object is dropped, the store removes the files once all their names were rewritten and sealed.
    """

    index: int
    extents: Mapping[str, tuple[Extent, ...]]
    files: tuple[str, ...]
    kind: str
    _pin: list[object] = field(default_factory=list, repr=False)
    _make_durable: Callable[[], None] = field(default=lambda: None, repr=False)

    def make_durable(self) -> None:
        """Sync the files and write the index, after which the generation survives a crash.

        Needed only after `ExtentStore.seal(durable=False)`. May be called on any thread and more than once; once
        syncing has failed, every call raises its error.
        """
        self._make_durable()

    def release(self) -> None:
        """Let the store remove the files as soon as it does not need them itself; hard links to them stay. May be
        called twice.
        """
        self._pin.clear()
