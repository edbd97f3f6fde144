"""The files of one generation: created, sealed, opened again, removed. A generation is what a store writes between two
seals; a stripe is the number of a path, from 0. A described buffer is memory as `_buffers` returns it: a flat
memoryview of bytes, or (address, bytes, owner).
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
    """Names, locks and lists the files of a store, which are `<prefix>.g<generation>.s<stripe>.extents` in each of
    `paths`, and an index of each sealed generation beside one of them. `state`: which paths can be written to.

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

        ExtentError while another store, here or in another process, holds one of the paths; if two paths are the same
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
        """Raise ExtentError if folders that the store had are missing and either `resume` is true or read-only files
        are here, which may belong to a generation whose index is in a missing folder.
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
        """Write into each lock file the folders that the store has now and those that it had, and set `former`. A
        folder without an id of its own gets one.
        """
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
        """Return whether a folder is one of the store's paths, perhaps under another name."""
        return folder in self.paths or any(os.path.exists(folder) and os.path.samefile(folder, p) for p in self.paths)

    def forget_if_empty(self) -> None:
        """Remove the list of folders from the lock files if no file of the store is left, so that none is missed later.
        A lock file that cannot be written stays as it is.
        """
        if not any(holds_files(path, self.prefix) for path in self.paths):
            for lock in self._locks:
                with suppress(OSError):
                    lock.write(lock.record._replace(folders={}), durable=False)

    def give_back(self) -> None:
        """Release the locks and close their descriptors; the store is unlocked even if a forked process has copies of
        the descriptors.
        """
        while self._locks:
            self._locks.pop().give_back()

    def require_there(self, stripe: int, path: str) -> None:
        """Raise MissingPathError, naming `path`, a file about to be made, if the folder of its stripe is not the one
        that was locked: the file would then be on the drive of the mount point.
        """
        if os.path.exists(self.paths[stripe]) and not self._locks[stripe].is_same_folder():
            raise MissingPathError(
                f"'{self.paths[stripe]}' is not the folder that it was when the store was opened; was its drive "
                "unmounted?",
                errno=errno.ENOENT,
                path=path,
            )

    def shares_blocks(self, stripe: int) -> bool:
        """Return whether the files of a stripe can share blocks; the first call tries it, and the answer is remembered.
        If the trial fails, return False this time, or raise its error (OSError) if there is only one path.
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
        """Return the name, without its folder, of the file of one generation and stripe."""
        return f"{self.prefix}.g{generation:06d}.s{stripe}.extents"

    def data_path(self, generation: int, stripe: int) -> str:
        """Return the path of the file of one generation and stripe; it need not exist."""
        return os.path.join(self.paths[stripe], self.data_name(generation, stripe))

    def index_candidates(self, generation: int) -> list[str]:
        """Return the paths at which the index of a generation may be, one in each folder, in the order in which writing
        is to be tried: full and failed folders come last.
        """
        return [os.path.join(self.paths[s], f"{self.prefix}.g{generation:06d}.index") for s in self.state.usable_first]

    def index_path(self, generation: int) -> str:
        """Return the path of the index of a sealed generation, which exists in one of the folders."""
        return next(filter(os.path.exists, self.index_candidates(generation)))

    def indexes(self) -> list[int]:
        """Return the numbers of the sealed generations in the folders, ascending."""
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.index")
        found = (pattern.fullmatch(name) for path in self.paths for name in os.listdir(path))
        return sorted({int(match.group(1)) for match in found if match})

    def _unsealed_files(self) -> list[str]:
        """Return the paths of all files in the store's folders that belong to a generation without an index."""
        sealed = set(self.indexes())
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.(?:s\d+\.extents|index\.part)")
        found = [(path, pattern.fullmatch(name)) for path in self.paths for name in os.listdir(path)]
        return [os.path.join(path, m.group()) for path, m in found if m and int(m.group(1)) not in sealed]

    def _remove_unsealed(self) -> None:
        """Delete the files of generations without an index, which a killed process was writing."""
        for path in self._unsealed_files():
            os.unlink(path)


class GenerationFiles:
    """The files of generation number `generation` of the store in `folders`, by stripe, each opened on first use by the
    one of `engines` for that stripe; a stripe without data has no file.

    New files are writable; after `open_sealed` or `reopen_sealed` files are opened for reading. If there are several
    paths, `header_bytes` are written for a header at the start of each new file, since its path may fill up later.

    Attributes:
        generation: the generation's number.
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
        """Return the stripes whose file is open, ascending."""
        return sorted(self._files)

    @property
    def nbytes(self) -> int:
        """Return the current size of all open files together, in bytes."""
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
        """Start a read, or with `write` a write, of described buffers, one after the other from `offset` (bytes) of a
        stripe's file on; return the request. `checksum`: compute that of the bytes. OpenError if the file cannot be
        opened, TransferError if there is no room for its header.
        """
        return self._engines[stripe].submit_items(write, self.file(stripe), items, offset, checksum)

    def leave_out_spoiled(self, needed: Set[int]) -> None:
        """Forget the failed writes of all stripes, so that syncing does not raise them. Files of spoiled stripes that
        are not `needed` leave the generation, and are deleted if their drive lets them. The caller has waited for all
        writes.
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
        """Open the files of these stripes, which must exist, for reading; files opened later are opened for reading
        too.
        """
        self._writable = False
        for stripe in stripes:
            self.file(stripe)

    def finish(self, ends: Sequence[int], headers: dict[int, bytes]) -> None:
        """Truncate each file to its entry in `ends` (bytes, by stripe), write the headers (by stripe) to the start of
        the files and remove their write permission. Descriptors that are open can still write.
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
        """Open all files anew for reading, in place of the writable ones, which stay open until a caller that has taken
        them from `opened` closes them.
        """
        written, self._files = self._files, {}
        self.open_sealed(sorted(written))

    def close(self) -> None:
        """Wait for the files' requests and close the files; `file` opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def remove(self, *, whole_store: bool = False) -> None:
        """Close and delete the files and the index; hard links elsewhere keep their content. What is on a drive that
        failed, one of several, is left there; if that is the index, all files are left, since the generation still
        exists, unless the `whole_store` is removed. OSError if something else cannot be deleted.
        """
        stripes = self.stripes
        self.close()
        # Without its index a generation does not exist, so the index goes first.
        gone = [self._delete(path) for path in self._folders.index_candidates(self.generation)]
        if all(gone) or whole_store:
            for stripe in stripes:
                self._delete(self.path(stripe))

    def _delete(self, path: str) -> bool:
        """Delete a file if it exists; return True, or False if it is still there because its drive, one of several,
        failed. OSError for any other failure.
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
