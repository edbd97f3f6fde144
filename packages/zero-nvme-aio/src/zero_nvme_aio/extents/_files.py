"""The files of one generation: created, sealed, opened again, removed. A generation is what a store writes between two
seals; a stripe is the number of a path, from 0.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Any

from .._engine import Engine
from .._file import File
from .._lock_files import FolderRecord, LockFile, holds_files, missing_folders
from .._request import Request
from ..errors import ExtentError, MissingPathError, TransferError
from ._paths import StorePaths
from ._reflink import shares_blocks

__all__ = ["GenerationFiles", "StoreFolders"]


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
        self._locks: list[LockFile] = []
        self.former: set[str] = set()

    def take(self, resume: bool) -> None:
        """Make the folders, lock the store until `give_back`, and remove the files of generations that were not sealed;
        the lock files list the paths and `former`. Two stores exclude each other if they have the same prefix and a
        path in common.

        ExtentError while another one, here or in another process, has one of the paths; if two of them are the same
        folder; if the folders hold sealed generations and `resume` is false; and if a folder that the store had is
        missing, without which it cannot be resumed, or without which it is not known what was sealed: then nothing is
        removed. OSError for a folder or lock file that cannot be made, opened or locked.
        """
        try:
            for number, path in enumerate(self.paths):
                os.makedirs(path, exist_ok=True)
                twin = next((other for other in self.paths[:number] if os.path.samefile(path, other)), None)
                if twin is not None:
                    raise ExtentError(f"'{path}' and '{twin}' are the same folder; name each path of a store once")
                self._locks.append(LockFile(path, self.prefix))
            self._refuse_missing_folders(resume)
            self._remove_unsealed()
            found = self.indexes()
            if found and not resume:
                raise ExtentError(
                    f"'{self.paths[0]}' already holds a store '{self.prefix}' with {len(found)} generations; "
                    "pass resume=True to continue it, or choose another folder or prefix"
                )
            self._write_lock_files()
        except BaseException:
            self.give_back()
            raise

    def _refuse_missing_folders(self, resume: bool) -> None:
        """Raise ExtentError if folders that the store had are missing, and it is to be resumed, or has files here that
        may belong to a generation whose index is there.
        """
        missing = missing_folders(self.prefix, {lock.folder: lock.record for lock in self._locks})
        kept = [path for path in self._unsealed_files() if not os.stat(path).st_mode & 0o222]
        if missing and (resume or kept):
            what = f"'{kept[0]}' may belong to what was sealed with it" if kept else "what was sealed may be in it"
            lists = [lock for lock in self._locks if set(missing) & set(lock.record.folders.values())]
            files = ", ".join(f"'{os.path.join(lock.folder, self.prefix)}.lock'" for lock in lists)
            raise ExtentError(
                f"the store '{self.prefix}' had the folder {' and the folder '.join(missing.values())}; {what}, so "
                f"nothing was removed. Mount its drive, or name it too; to do without what it holds, delete {files}"
            )

    def _write_lock_files(self) -> None:
        """Write into each lock file what the folders of the store are now, with those that it had."""
        records = [lock.record for lock in self._locks]
        listed = {path for record in records for path in (*record.folders.values(), *record.former)}
        self.former = {path for path in listed if not self._is_path(path) and holds_files(path, self.prefix)}
        for number, lock in enumerate(self._locks):
            if lock.record.id in {other.record.id for other in self._locks[:number]}:  # copied with its folder
                lock.record = lock.record._replace(id="")
            lock.ensure_id()  # before any lists it: a folder that has no id is not the one that is listed
        folders = {lock.record.id: lock.folder for lock in self._locks}
        for lock in self._locks:
            lock.write(FolderRecord(lock.record.id, folders, sorted(self.former)))

    def _is_path(self, folder: str) -> bool:
        """Return whether a folder is one of the paths."""
        return folder in self.paths or any(os.path.exists(folder) and os.path.samefile(folder, p) for p in self.paths)

    def forget_if_empty(self) -> None:
        """Note in the lock files that there is no store any more, if its files are gone, so that its folders are not
        missed. Where that cannot be written, do nothing.
        """
        if not any(holds_files(path, self.prefix) for path in self.paths):
            for lock in self._locks:
                with suppress(OSError):
                    lock.write(lock.record._replace(folders={}), durable=False)

    def give_back(self) -> None:
        """Release the locks and close their descriptors; the store is unlocked even if a forked process has copies of
        them.
        """
        while self._locks:
            self._locks.pop().give_back()

    def require_there(self, stripe: int, path: str) -> None:
        """Raise MissingPathError, about a new file at `path`, if the folder of a stripe is not the one that was locked:
        the file would be on the drive of the mount point.
        """
        if os.path.exists(self.paths[stripe]) and not self._locks[stripe].is_same_folder():
            raise MissingPathError(
                f"'{self.paths[stripe]}' is not the folder that it was when the store was opened; was its drive "
                "unmounted?",
                errno=errno.ENOENT,
                path=path,
            )

    def shares_blocks(self, stripe: int) -> bool:
        """Return whether the files of a stripe can share blocks, found by a trial on the first call and remembered.
        False while one of several paths takes no writes: what is there stays where it is. Raises the error of the
        trial on a single path.
        """
        if stripe not in self._sharing:
            try:
                self._sharing[stripe] = shares_blocks(self.paths[stripe])
            except OSError:
                if len(self.paths) == 1:
                    raise
                return False
        return self._sharing[stripe]

    def data_name(self, generation: int, stripe: int) -> str:
        """Return the file name of a stripe of a generation."""
        return f"{self.prefix}.g{generation:06d}.s{stripe}.extents"

    def data_path(self, generation: int, stripe: int) -> str:
        """Return the path of the file of a stripe of a generation."""
        return os.path.join(self.paths[stripe], self.data_name(generation, stripe))

    def index_candidates(self, generation: int) -> list[str]:
        """Return the paths at which a generation's index may lie, one in each folder, in the order in which to try
        them: it can be written to the first, unless that path turns out to be full or to have failed.
        """
        return [os.path.join(self.paths[s], f"{self.prefix}.g{generation:06d}.index") for s in self.state.usable_first]

    def index_path(self, generation: int) -> str:
        """Return the path of the index of a sealed generation."""
        return next(filter(os.path.exists, self.index_candidates(generation)))

    def indexes(self) -> list[int]:
        """Return the numbers of the sealed generations in the folders, ascending."""
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.index")
        found = (pattern.fullmatch(name) for path in self.paths for name in os.listdir(path))
        return sorted({int(match.group(1)) for match in found if match})

    def _unsealed_files(self) -> list[str]:
        """Return the paths of the files of generations without an index in these folders."""
        sealed = set(self.indexes())
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.(?:s\d+\.extents|index\.part)")
        found = [(path, pattern.fullmatch(name)) for path in self.paths for name in os.listdir(path)]
        return [os.path.join(path, m.group()) for path, m in found if m and int(m.group(1)) not in sealed]

    def _remove_unsealed(self) -> None:
        """Delete the files of generations without an index, which a killed process was writing."""
        for path in self._unsealed_files():
            os.unlink(path)


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
        """Return the stripe whose file has, or would have, this path; None if there is none."""
        return next((stripe for stripe in range(len(self._engines)) if self.path(stripe) == path), None)

    def file(self, stripe: int) -> File:
        """Return the open file of a stripe; on first use it is created, or opened for reading if the generation is
        sealed. Raises OpenError, and TransferError if there is no room for its header.
        """
        if stripe not in self._files:
            engine = self._engines[stripe]
            if self._writable:
                self._folders.require_there(stripe, self.path(stripe))
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

    def finish(self, ends: Sequence[int], headers: dict[int, bytes]) -> None:
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

    def remove(self, *, whole_store: bool = False) -> None:
        """Close and delete the files and the index, but for those that a drive that failed, one of several, does not
        let go; hard links elsewhere keep their content. If the index stays, so do the files, as the generation still
        exists, unless the `whole_store` is removed. Raises OSError.
        """
        stripes = self.stripes
        self.close()
        # Without its index a generation does not exist, so the index goes first.
        gone = [self._delete(path) for path in self._folders.index_candidates(self.generation)]
        if all(gone) or whole_store:
            for stripe in stripes:
                self._delete(self.path(stripe))

    def _delete(self, path: str) -> bool:
        """Delete a file if it exists; return whether it is gone, false if its drive, one of several, failed. Raises
        OSError.
        """
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._folders.state.is_drives_error(error):
                raise
            return False
        return True
