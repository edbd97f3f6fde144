"""A sealed generation as its users see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Extent", "Generation"]


@dataclass(frozen=True)
class Extent:
    """Bytes [offset_bytes, offset_bytes + nbytes) of a name, at `file_offset_bytes` of `path`.

    `checksum` is `"xxh3_64:<16 hex>"` of exactly these bytes, empty only while unsealed. `key` is the entry in a
    safetensors file (one dimension, of the dtype declared), empty in the raw kind.
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

    `extents`: name -> pieces in order of offset, of this generation only (`ExtentStore.extents` has the whole current
    state). `files`: the paths. `kind`: "safetensors" or "raw". While this object is alive its files stay in the store,
    so that they can be hard-linked; `release()` or dropping it lets the store remove them once every name in them was
    rewritten and sealed.
    """

    index: int
    extents: Mapping[str, tuple[Extent, ...]]
    files: tuple[str, ...]
    kind: str
    _pin: list[object] = field(default_factory=list, repr=False)
    _last: Callable[[], None] = field(default=lambda: None, repr=False)

    def make_durable(self) -> None:
        """Syncs the files and writes the index: from here on the generation survives a crash. On any thread, any number
        of times; needed only after `ExtentStore.seal(durable=False)`. Raises what syncing met, and may be called again.
        """
        self._last()

    def release(self) -> None:
        """Allows the store to remove the files as soon as it does not need them itself."""
        self._pin.clear()
