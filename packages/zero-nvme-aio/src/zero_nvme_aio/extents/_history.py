"""The generations of a store: which survive a crash, which somebody holds, and which are removed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from ._files import GenerationFiles, StoreFolders
from ._generation import Extent, Generation
from ._ranges import Covered, WrittenRange
from ._sealing import Lasting

__all__ = ["History"]

_Live = dict[str, list[Covered]]
_PATIENCE_SECONDS = 60.0  # a thread that is interrupted while it removes files never says that it is done


class History:
    """Keeps the files of the open generation, and of those before it for as long as anything needs them.

    `live`: the current state, which its store changes. `lock`: the store's; it is held in every call but for those of
    a `Generation`, which may come on any thread. Removing large files takes long: calls that come without the lock do
    it after they have given it back, so that nobody waits for it but `close`.
    """

    def __init__(self, folders: StoreFolders, live: _Live, lock: threading.RLock) -> None:
        self._folders, self._live, self._lock = folders, live, lock
        self._removing, self._removed = 0, threading.Condition(lock)
        self.files: dict[int, GenerationFiles] = {}
        self.next = 1
        """The number of the open generation."""
        self._durable_live: _Live = {}
        self._lasting: tuple[Lasting, _Live] | None = None
        self._keys: dict[tuple[int, str, int], str] = {}
        self._pins: dict[int, weakref.finalize[Any, Any]] = {}
        self._closed = False

    def adopt(self, generations: Mapping[int, GenerationFiles], keys: Mapping[tuple[int, str, int], str]) -> None:
        """Takes over generations that survived their process; they make up the current state."""
        self.files.update(generations)
        self._keys.update(keys)
        self._durable_live = {name: list(covered) for name, covered in self._live.items()}
        self.next = max(generations, default=0) + 1

    def ended(
        self, lasting: Lasting, pieces: Sequence[WrittenRange], keys: Mapping[tuple[str, int], str], kind: str
    ) -> Generation:
        """Returns the open generation, which nothing writes from here on; the next one is open."""
        files = self.files[self.next]
        files.reopen_sealed()
        self._keys.update({(files.generation, *where): key for where, key in keys.items()})
        self._lasting = lasting, {name: list(covered) for name, covered in self._live.items()}
        self.next += 1
        extents: dict[str, list[Extent]] = {}
        for piece in sorted(pieces, key=lambda p: (p.name, p.begin)):
            extents.setdefault(piece.name, []).append(self.extent(Covered(piece.begin, piece.end, piece)))
        generation = Generation(
            index=files.generation,
            extents=MappingProxyType({name: tuple(found) for name, found in extents.items()}),
            files=tuple(files.path(stripe) for stripe in files.stripes),
            kind=kind,
            _last=partial(_make_last, lasting, weakref.ref(self)),
        )
        self._pin(generation)
        return generation

    def lasts(self, lasting: Lasting) -> None:
        """Lets go of what a generation supersedes that survives a crash now."""
        with self._lock:
            if self._lasting is not None and self._lasting[0] is lasting:
                _, self._durable_live = self._lasting
                self._lasting = None
                lasting.close()
            superseded = self._take_superseded()
        self._remove(superseded)

    def make_the_last_one_durable(self) -> None:
        """Makes the generation that was sealed last survive a crash. One that could not is dropped once nothing current
        is in it; raises what it met until then."""
        if self._lasting is None:
            return
        lasting, _ = self._lasting
        current = {c.piece.generation for covered in self._live.values() for c in covered}
        if lasting.error is None or lasting.generation in current:
            lasting.make()
            self.lasts(lasting)
        else:
            lasting.close()
            self._lasting = None

    def extent(self, covered: Covered) -> Extent:
        """Return where a covered range lies in files."""
        piece = covered.piece
        whole = (covered.begin, covered.end) == (piece.begin, piece.end)
        return Extent(
            path=self._folders.data_path(piece.generation, piece.stripe),
            file_offset_bytes=piece.file_offset + covered.begin - piece.begin,
            nbytes=covered.end - covered.begin,
            checksum=piece.checksum if whole else "",
            offset_bytes=covered.begin,
            key=self._keys.get((piece.generation, piece.name, piece.begin), "") if whole else "",
        )

    def close(self, *, remove: bool) -> None:
        """Close all files. With `remove` delete them; otherwise delete those of the open generation and make the last
        sealed one durable.
        """
        if not remove:
            self.make_the_last_one_durable()
        elif self._lasting is not None:
            self._lasting[0].close()
        self._closed = True
        self._removed.wait_for(lambda: not self._removing, _PATIENCE_SECONDS)
        for files in self.files.values():
            if remove or files.generation >= self.next:
                files.remove()
            else:
                files.close()

    def _pin(self, generation: Generation) -> None:
        token = _Pin()
        generation._pin.append(token)
        self._pins[generation.index] = weakref.finalize(token, _unpin, weakref.ref(self), generation.index)
        self._pins[generation.index].atexit = False

    def _unpin(self, index: int) -> None:
        with self._lock:
            self._pins.pop(index, None)
            superseded = self._take_superseded()
        self._remove(superseded)

    def _take_superseded(self) -> list[GenerationFiles]:
        """Take out and return the generations that nothing needs any more; the caller removes their files."""
        if self._closed:
            return []
        needed = {c.piece.generation for state in (self._live, self._durable_live) for cs in state.values() for c in cs}
        # A Generation may be collected, and this be entered again, at any point below: so copies and a default.
        idle = [i for i in list(self.files) if i < self.next and i not in needed and i not in self._pins]
        found = [files for files in [self.files.pop(index, None) for index in idle] if files is not None]
        self._removing += len(found)
        return found

    def _remove(self, superseded: Sequence[GenerationFiles]) -> None:
        for files in superseded:
            try:
                files.remove()
            finally:
                with self._lock:
                    self._removing -= 1
                    self._removed.notify_all()


class _Pin:
    """Lives as long as a user holds the Generation."""


def _make_last(lasting: Lasting, reference: weakref.ref[History]) -> None:
    """Make a generation durable, and tell its store, if that still exists."""
    lasting.make()
    history = reference()
    if history is not None:
        history.lasts(lasting)


def _unpin(reference: weakref.ref[History], index: int) -> None:
    history = reference()
    if history is not None:
        history._unpin(index)
