"""The files of one generation: created, sealed, opened again, removed. A generation is what a store writes between two
seals; a stripe is the number of a path, from 0.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Sequence, Set
from contextlib import nullcontext, suppress
from typing import Any

from .._engine import Engine
from .._file import File
from .._request import Request
from ..errors import ExtentError, TransferError
from ._paths import StorePaths
from ._reflink import shares_blocks

__all__ = ["GenerationFiles", "StoreFolders"]

_MOST_LOCK_BYTES = 1 << 20


class StoreFolders:
    """Names of a store's files: `<prefix>.g<generation>.s<stripe>.extents` in each of `paths`, the index beside one of
    them. `state`: which paths can be written to.

    Attributes:
        former: folders that the store had earlier beside one of its paths, and where files of it may be left.
    """

    def __init__(self, paths: Sequence[str], prefix: str, state: StorePaths) -> None:
        self.paths = paths
        self.prefix = prefix
        self.state = state
        self._sharing: dict[int, bool] = {}
        self._locks: list[int] = []
        self.former: set[str] = set()

    def take(self) -> None:
        """Make the folders and lock the store, until `give_back`; the lock files list paths and `former`. Two stores
        exclude each other if they have the same prefix and a path in common. ExtentError while another one, here or in
        another process, has one of the paths, and if two of them are the same folder; OSError for a folder or lock file
        that cannot be made, opened or locked.
        """
        try:
            for number, path in enumerate(self.paths):
                os.makedirs(path, exist_ok=True)
                twin = next((other for other in self.paths[:number] if os.path.samefile(path, other)), None)
                if twin is not None:
                    raise ExtentError(f"'{path}' and '{twin}' are the same folder; name each path of a store once")
                self._locks.append(self._lock(path))
            for descriptor in self._locks:
                self.former.update(_listed(os.pread(descriptor, _MOST_LOCK_BYTES, 0)))
            self.former = {path for path in self.former.difference(self.paths) if self._may_hold_files(path)}
            for descriptor in self._locks:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps([*self.paths, *sorted(self.former)]).encode(), 0)
        except BaseException:
            self.give_back()
            raise

    def _may_hold_files(self, path: str) -> bool:
        """Return whether a folder has files of the store, or cannot be looked at now."""
        try:
            return any(name.startswith(f"{self.prefix}.g") for name in os.listdir(path))
        except OSError:
            return True

    def _lock(self, path: str) -> int:
        """Lock one path and return the file descriptor that holds the lock. Errors as of `take`."""
        lock = os.path.join(path, f"{self.prefix}.lock")
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ExtentError(f"the store '{self.prefix}' in '{path}' is in use") from None
        except OSError as error:
            os.close(descriptor)
            raise OSError(error.errno, f"the file system has no locks ({error.strerror})", lock) from error
        return descriptor

    def give_back(self) -> None:
        """Release the locks and close their descriptors; the store is unlocked even if a forked process has copies of
        them.
        """
        while self._locks:
            descriptor = self._locks.pop()
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def shares_blocks(self, stripe: int) -> bool:
        """Return whether the files of a stripe can share blocks, found by a trial on the first call and remembered."""
        if stripe not in self._sharing:
            self._sharing[stripe] = shares_blocks(self.paths[stripe])
        return self._sharing[stripe]

    def data_name(self, generation: int, stripe: int) -> str:
        """Return the file name of a stripe of a generation."""
        return f"{self.prefix}.g{generation:06d}.s{stripe}.extents"

    def data_path(self, generation: int, stripe: int) -> str:
        """Return the path of the file of a stripe of a generation."""
        return os.path.join(self.paths[stripe], self.data_name(generation, stripe))

    def index_path(self, generation: int) -> str:
        """Return the path of a generation's index, which exists once the generation is sealed."""
        places = [os.path.join(path, f"{self.prefix}.g{generation:06d}.index") for path in self.paths]
        return next(filter(os.path.exists, places), places[self.state.first_writable])

    def indexes(self) -> list[int]:
        """Return the numbers of the sealed generations in the folders, ascending."""
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.index")
        found = (pattern.fullmatch(name) for path in self.paths for name in os.listdir(path))
        return sorted({int(match.group(1)) for match in found if match})

    def remove_unsealed(self) -> None:
        """Delete the files of generations without an index, which a killed process was writing."""
        sealed = set(self.indexes())
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.(?:s\d+\.extents|index\.part)")
        for path in self.paths:
            for name in os.listdir(path):
                match = pattern.fullmatch(name)
                if match and int(match.group(1)) not in sealed:
                    os.unlink(os.path.join(path, name))


def _listed(content: bytes) -> list[str]:
    """Return the folders that a lock file lists; none if it is damaged or empty."""
    try:
        found = json.loads(content)
    except ValueError:
        return []
    return [path for path in found if isinstance(path, str)] if isinstance(found, list) else []


class GenerationFiles:
    """Open files of one generation of the store in `folders`, by stripe, each opened by the one of `engines` for that
    stripe; a stripe without data has no file. New files are writable; after `open_sealed` or `reopen_sealed` files are
    opened for reading. `header_bytes` are left for a header at the start of each new file; of several files each has
    the space from the start, since its path may fill up.

    Attributes:
        spoiled: stripes with failed writes, whose bytes were written elsewhere.
    """

    def __init__(
        self, engines: Sequence[Engine], folders: StoreFolders, generation: int, header_bytes: int = 0
    ) -> None:
        self._engines = engines
        self._header_bytes = header_bytes if len(engines) > 1 else 0
        self._folders = folders
        self.generation = generation
        self.spoiled: set[int] = set()
        self._files: dict[int, File] = {}
        self._writable = True

    @property
    def stripes(self) -> list[int]:
        """Return the stripes that have a file, ascending."""
        return sorted(self._files)

    @property
    def nbytes(self) -> int:
        """Return the current bytes of all files together."""
        return sum(file.size for file in self._files.values())

    def path(self, stripe: int) -> str:
        """Return the path of a stripe's file, which need not exist."""
        return self._folders.data_path(self.generation, stripe)

    def stripe_of(self, path: str | None) -> int | None:
        """Return the stripe whose file has this path; None if there is none."""
        return next((stripe for stripe in self._files if self.path(stripe) == path), None)

    def file(self, stripe: int) -> File:
        """Return the open file of a stripe; on first use it is created, or opened for reading if the generation is
        sealed. Raises OpenError, and TransferError if there is no room for its header.
        """
        if stripe not in self._files:
            engine = self._engines[stripe]
            file = engine.open(self.path(stripe), "rw" if self._writable else "r")
            if self._writable and self._header_bytes:
                try:
                    engine.write(file, bytes(self._header_bytes), 0).wait()
                except BaseException:
                    file.close()
                    with suppress(OSError):
                        os.unlink(self.path(stripe))
                    raise
            self._files[stripe] = file
        return self._files[stripe]

    def engine(self, stripe: int) -> Engine:
        """Return the engine of a stripe's file."""
        return self._engines[stripe]

    def submit(self, write: bool, stripe: int, items: list[Any], offset: int, checksum: bool) -> Request:
        """Start a read, or with `write` a write, of described buffers from or to the file of a stripe at `offset`
        (bytes), and return the request. `checksum`: compute it. Errors as of `file`.
        """
        return self._engines[stripe].submit_items(write, self.file(stripe), items, offset, checksum)

    def leave_out_spoiled(self, needed: Set[int]) -> None:
        """Forget the failed writes of all stripes; the files of spoiled stripes that are not `needed` leave the
        generation, and are removed if that is possible. All writes have ended.
        """
        for stripe in self.spoiled & set(self._files):
            with suppress(TransferError):  # the failed write's, which the next sync of the file would raise
                self._engines[stripe].sync(self._files[stripe])
            if stripe not in needed:
                self._files.pop(stripe).close()
                with suppress(OSError):
                    os.unlink(self.path(stripe))
        self.spoiled.clear()

    def open_sealed(self, stripes: Sequence[int]) -> None:
        """Open the files of these stripes, which exist, for reading; later ones are opened for reading too."""
        self._writable = False
        for stripe in stripes:
            self.file(stripe)

    def end(self, ends: Sequence[int], headers: dict[int, bytes]) -> None:
        """Truncate each file to its entry in `ends` (bytes, by stripe), write the headers (by stripe) to the start of
        the files and remove their write permission. The open files stay writable.
        """
        for stripe, file in self._files.items():
            os.truncate(self.path(stripe), ends[stripe])
            if stripe in headers:
                self._engines[stripe].write(file, headers[stripe], 0).wait()
            os.chmod(self.path(stripe), 0o444)

    @property
    def opened(self) -> dict[int, File]:
        """Return the open files by stripe."""
        return dict(self._files)

    def reopen_sealed(self) -> None:
        """Replace the files by ones opened for reading; the writable ones stay open, and their holder closes them."""
        written, self._files = self._files, {}
        self.open_sealed(sorted(written))

    def close(self) -> None:
        """Wait for the files' requests and close them; `file` opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def remove(self) -> None:
        """Close and delete the files and the index, but for those that a failed path does not let go; hard links
        elsewhere keep their content.
        """
        stripes = self.stripes
        self.close()
        # Without its index a generation does not exist, so the index goes first.
        index = self._folders.index_path(self.generation)
        if os.path.exists(index):
            os.unlink(index)
        for stripe in stripes:
            with suppress(OSError) if self._folders.state.has_failed(stripe) else nullcontext():
                if os.path.exists(self.path(stripe)):
                    os.unlink(self.path(stripe))
