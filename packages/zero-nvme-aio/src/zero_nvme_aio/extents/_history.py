"""The generations of a store: which survive a crash, which users hold, and which are removed. A generation is the files
written between two seals; the last one is open.
"""

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
from ._sealing import GenerationSync

__all__ = ["History"]

_Coverage = dict[str, list[Covered]]
"""Name -> the ranges that hold its bytes, in order."""
_REMOVAL_SECONDS = 60.0  # bound of `close`'s wait: a thread that was interrupted while it removed files never ends it


class History:
    """Keeps the files of the open generation, and of earlier ones for as long as anything needs them: the current
    state, the newest state that survives a crash, or a user who holds the `Generation`.

    `live`: the current state (name -> the ranges that hold its bytes, in order), which the store changes. `folders`:
    those of the store's files. `lock`: the store's, which the store holds whenever it calls; calls through a
    `Generation` come on any thread and take it. Large files take long to remove, so these calls do that after they have
    released the lock, and only `close` waits for it.

    Attributes:
        files: generation number -> its files; the open generation has some once it is written to.
        open_number: the number of the open generation.
    """

    def __init__(self, folders: StoreFolders, live: _Coverage, lock: threading.RLock) -> None:
        self._folders, self._live, self._lock = folders, live, lock
        self._removing, self._removed = 0, threading.Condition(lock)
        self.files: dict[int, GenerationFiles] = {}
        self.open_number = 1
        self._durable_live: _Coverage = {}
        self._unsynced: tuple[GenerationSync, _Coverage] | None = None
        """The last sealed generation and the state with it, until it survives a crash."""
        self._keys: dict[tuple[int, str, int], str] = {}
        self._pins: dict[int, weakref.finalize[Any, Any]] = {}
        self._closed = False

    def adopt(self, generations: Mapping[int, GenerationFiles], keys: Mapping[tuple[int, str, int], str]) -> None:
        """Add the sealed generations that were found in the folders, by number; together they hold the current state,
        `live`. The open generation gets the next number.

        `keys`: (generation, name, begin) -> entry of the safetensors file.
        """
        self.files.update(generations)
        self._keys.update(keys)
        self._durable_live = {name: list(covered) for name, covered in self._live.items()}
        self.open_number = max(generations, default=0) + 1

    def add_sealed(
        self, sync: GenerationSync, pieces: Sequence[WrittenRange], keys: Mapping[tuple[str, int], str], kind: str
    ) -> Generation:
        """Return a `Generation`, for the user, of the open generation, whose files were just sealed; a new generation,
        with the next number, becomes the open one.

        `sync`: makes the sealed one durable. `pieces`: its ranges. `keys`: (name, begin) -> entry of the safetensors
        file. `kind`: "safetensors" or "raw".
        """
        files = self.files[self.open_number]
        files.reopen_sealed()
        self._keys.update({(files.generation, *where): key for where, key in keys.items()})
        self._unsynced = sync, {name: list(covered) for name, covered in self._live.items()}
        self.open_number += 1
        extents: dict[str, list[Extent]] = {}
        for piece in sorted(pieces, key=lambda p: (p.name, p.begin)):
            extents.setdefault(piece.name, []).append(self.extent(Covered(piece.begin, piece.end, piece)))
        generation = Generation(
            index=files.generation,
            extents=MappingProxyType({name: tuple(found) for name, found in extents.items()}),
            files=tuple(files.path(stripe) for stripe in files.stripes),
            kind=kind,
            _make_durable=partial(_make_durable, sync, weakref.ref(self)),
        )
        self._pin(generation)
        return generation

    def note_durable(self, sync: GenerationSync) -> None:
        """Record that the generation of `sync` survives a crash now, and close `sync`; do neither if a later generation
        was sealed meanwhile. Then remove the files of generations that nothing needs any more.
        """
        with self._lock:
            if self._unsynced is not None and self._unsynced[0] is sync:
                _, self._durable_live = self._unsynced
                self._unsynced = None
                sync.close()
            unneeded = self._take_unneeded()
        self._remove_files(unneeded)

    def make_last_durable(self) -> None:
        """Sync the generation that was sealed last, if that was not done yet.

        If it failed before, raise that error for as long as the generation holds current bytes; after that stop trying,
        and the generation never survives a crash.
        """
        if self._unsynced is None:
            return
        sync, _ = self._unsynced
        current = {c.piece.generation for covered in self._live.values() for c in covered}
        if sync.error is None or sync.generation in current:
            sync.run()
            self.note_durable(sync)
        else:
            sync.close()
            self._unsynced = None

    def extent(self, covered: Covered) -> Extent:
        """Return where a covered range lies in files; the extent has a checksum and a key only if it is all of a
        written range.
        """
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
        sealed one durable, whose error is raised before anything is closed.

        Waits, up to 60 seconds, for threads that are removing files.
        """
        if not remove:
            self.make_last_durable()
        elif self._unsynced is not None:
            self._unsynced[0].close()
        self._closed = True
        self._removed.wait_for(lambda: not self._removing, _REMOVAL_SECONDS)
        for files in self.files.values():
            if remove or files.generation >= self.open_number:
                files.remove(whole_store=remove)
            else:
                files.close()

    def _pin(self, generation: Generation) -> None:
        """Keep the files of `generation` until its user releases or drops it."""
        token = _Pin()
        generation._pin.append(token)
        self._pins[generation.index] = weakref.finalize(token, _unpin, weakref.ref(self), generation.index)
        self._pins[generation.index].atexit = False

    def _unpin(self, index: int) -> None:
        """Remove the files of generation number `index`, which no user holds any more, if nothing else needs them."""
        with self._lock:
            self._pins.pop(index, None)
            unneeded = self._take_unneeded()
        self._remove_files(unneeded)

    def _take_unneeded(self) -> list[GenerationFiles]:
        """Take the generations that nothing needs any more out of `files` and return them; the caller holds the lock,
        and passes them to `_remove_files` after releasing it. Empty after `close`.
        """
        if self._closed:
            return []
        states = [self._live, self._durable_live, *([] if self._unsynced is None else [self._unsynced[1]])]
        needed = {c.piece.generation for state in states for covered in state.values() for c in covered}
        # A Generation may be collected, and this be entered again, at any point below: so copies and a default.
        idle = [i for i in list(self.files) if i < self.open_number and i not in needed and i not in self._pins]
        found = [files for files in [self.files.pop(index, None) for index in idle] if files is not None]
        self._removing += len(found)
        return found

    def _remove_files(self, unneeded: Sequence[GenerationFiles]) -> None:
        """Delete the files of the generations that `_take_unneeded` returned; takes the lock for a moment
        after each.
        """
        for files in unneeded:
            try:
                files.remove()
            finally:
                with self._lock:
                    self._removing -= 1
                    self._removed.notify_all()


class _Pin:
    """Token that lives until a `Generation` is released or dropped."""


def _make_durable(sync: GenerationSync, reference: weakref.ref[History]) -> None:
    """Run `sync`, which makes its generation durable, and record that in the store's history if the store still exists.
    Raises the error of syncing.
    """
    sync.run()
    history = reference()
    if history is not None:
        history.note_durable(sync)


def _unpin(reference: weakref.ref[History], index: int) -> None:
    """Tell the history, if the store still exists, that the user holds generation number `index` no more; the finalizer
    of a `_Pin`.
    """
    history = reference()
    if history is not None:
        history._unpin(index)
