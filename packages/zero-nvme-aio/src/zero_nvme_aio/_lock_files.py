"""The lock files of a store, `<prefix>.lock` in each of its folders: they are locked while the store is open, and what
they say tells whether all folders of the store are there.

Line one is JSON: `{"id": …, "folders": {id: path, …}, "former": [path, …]}`. The id is the folder's own, made once, so
that a folder is known under another path, and an empty mount point is not taken for the drive.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ._tensors import sync_folder
from .errors import ExtentError

__all__ = ["FolderRecord", "LockFile", "holds_files", "missing_folders", "read_record"]

_MOST_BYTES = 1 << 20


class FolderRecord(NamedTuple):
    """The content of a lock file: the `id` of its folder; the `folders` of the store when it was written, their paths
    by id; and `former`, the paths of folders that the store had earlier, where files of it may be left. All are empty
    if nothing is known.
    """

    id: str = ""
    folders: Mapping[str, str] = {}
    former: Sequence[str] = ()


class LockFile:
    """The lock of the store named `prefix` in one folder, held until `give_back`. ExtentError if another store object,
    here or in another process, holds it, and if it is another user's; OSError if it cannot be made, opened or locked.

    Attributes:
        folder: the folder.
        record: the file's present content.
    """

    def __init__(self, folder: str, prefix: str) -> None:
        self.folder = folder
        self._path = path = os.path.join(folder, f"{prefix}.lock")
        self._was = os.stat(folder)
        try:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except PermissionError:
            _refuse_another_user(path, prefix)
            raise
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ExtentError(f"the store '{prefix}' in '{folder}' is in use") from None
        except OSError as error:
            os.close(self._descriptor)
            raise OSError(error.errno, f"the file system has no locks ({error.strerror})", path) from error
        self.record = _parse_record(os.pread(self._descriptor, _MOST_BYTES, 0))

    def is_same_folder(self) -> bool:
        """Return whether the path still leads to the folder that was locked; False if its drive was unmounted since."""
        return os.path.exists(self.folder) and os.path.samestat(os.stat(self.folder), self._was)

    def ensure_id(self) -> None:
        """Give the folder a new id, which survives a crash, if its record has none. OSError if the lock file cannot be
        written.
        """
        if not self.record.id:
            self.write(self.record._replace(id=uuid.uuid4().hex))

    def write(self, record: FolderRecord, *, durable: bool = True) -> None:
        """Replace the content of the lock file, and `self.record`, by `record`; if `durable`, it survives a crash.
        OSError if it cannot be written.
        """
        if record == self.record:
            return
        content = json.dumps(record._asdict()).encode() + b"\n"
        try:
            os.pwrite(self._descriptor, content, 0)  # its first line counts: whole, whatever is left behind it
            os.ftruncate(self._descriptor, len(content))
            if durable:
                os.fsync(self._descriptor)
                sync_folder(self.folder)
        except OSError as error:
            raise OSError(error.errno, f"cannot write the lock file ({error.strerror})", self._path) from error
        self.record = record

    def give_back(self) -> None:
        """Release the lock and close the file; the lock is released even if a forked process has a copy of the
        descriptor.
        """
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def read_record(folder: str, prefix: str) -> FolderRecord:
    """Return the content of a store's lock file in a folder, without locking it; an empty record if there is none or it
    cannot be read.
    """
    try:
        with open(os.path.join(folder, f"{prefix}.lock"), "rb") as file:
            return _parse_record(file.read(_MOST_BYTES))
    except OSError:
        return FolderRecord()


def holds_files(folder: str, prefix: str) -> bool:
    """Return whether a folder has files of the store named `prefix`; True also if the folder cannot be looked
    at now.
    """
    try:
        return any(name.startswith(f"{prefix}.g") for name in os.listdir(folder))
    except OSError:
        return True


def missing_folders(prefix: str, records: Mapping[str, FolderRecord]) -> dict[str, str]:
    """Return the folders that a store had, according to its lock files, and that are not among those given: their
    paths, each with the reason in words, to be used as the end of a sentence. `records`: the content of the lock file
    in each folder given, by the folder's path.

    A folder that can be looked at and holds no files is not missing. One whose lock file is lost is known by its path,
    if it holds files.
    """
    here = {record.id for record in records.values() if record.id}
    listed = {key: path for record in records.values() for key, path in record.folders.items() if key not in here}
    found = {}
    for key, path in listed.items():
        twin = next((folder for folder in records if _is_same_folder(folder, path)), None)
        if twin is None:
            if read_record(path, prefix).id != key or holds_files(path, prefix):
                found[path] = f"'{path}', which is not among the paths"
        elif records[twin].id or not holds_files(twin, prefix):
            found[path] = f"'{path}', and the folder that is at '{twin}' now is not the one; is its drive mounted?"
    return found


def _refuse_another_user(path: str, prefix: str) -> None:
    """Raise ExtentError if the lock file at `path`, of the store named `prefix`, belongs to another user; return if it
    does not, or does not exist.
    """
    if os.path.exists(path) and (owner := os.stat(path).st_uid) != os.geteuid():
        folder = os.path.dirname(path)
        raise ExtentError(f"'{prefix}' in '{folder}' is another user's store (uid {owner}); name a folder of your own")


def _is_same_folder(one: str, other: str) -> bool:
    """Return whether two paths lead to the same folder; False if one of them cannot be looked at."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _parse_record(content: bytes) -> FolderRecord:
    """Return the record in a lock file's content; an empty record if the content is empty or damaged."""
    try:
        found = json.loads(content.partition(b"\n")[0])
        own, folders, former = found["id"], found["folders"], found["former"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return FolderRecord()
    texts = [own, former] if not isinstance(former, list) else [own, *former]
    if not isinstance(folders, dict) or not all(isinstance(text, str) for text in (*texts, *folders.values())):
        return FolderRecord()
    return FolderRecord(own, folders, former)
