"""Rewrite damaged slices from their twins: slices of other checkpoints with the same checksum, and so the same bytes.

A slice is a run of a tensor's elements in one data file of a checkpoint, with a checksum. All functions raise
DamagedError for a file of the checkpoint that cannot be read, and OSError for one that cannot be written.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from .catalog import load_manifest
from .errors import CheckpointError, DamagedError
from .headers import read_entries
from .manifest import Manifest, Slice, TensorEntry
from .opened import Folder, read_fd
from .safetensors_file import HeaderEntry
from .scanning import SCAN_BYTES, scan_fd
from .types import ITEMSIZE


class _OpenCheckpoint:
    """The checkpoint directory `path`, its manifest, and the headers of its data files, each of which is read when it
    is first needed.

    Raises CheckpointError when the manifest cannot be read or a data file has not the size that the manifest gives.
    """

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path, follow=False)
        self.manifest: Manifest = load_manifest(self.folder)
        self._headers: dict[int, dict[str, HeaderEntry]] = {}

    def slices(self) -> list[tuple[TensorEntry, Slice]]:
        """Return every slice of the checkpoint, as pairs (its tensor, the slice)."""
        return [(tensor, piece) for tensor in self.manifest.tensors for piece in tensor.slices]

    def begin(self, piece: Slice) -> int:
        """Return the position of a slice in its file, in bytes. Raises DamagedError when the file's header does not
        have it."""
        if piece.begin is not None:
            return piece.begin
        entry = self.manifest.files[piece.file]
        if piece.file not in self._headers:
            self._headers[piece.file] = read_entries(self.folder, entry)
        stored = self._headers[piece.file].get(piece.key)
        if stored is None:
            raise DamagedError(f"{self.folder.path / entry.path}: the header does not hold slice {piece.key!r}")
        return stored.begin

    def open(self, piece: Slice, flags: int = os.O_RDONLY) -> int:
        """Open the file that holds a slice, with these `flags` of `os.open`, and return its descriptor, for the caller
        to close. Raises DamagedError when it cannot be opened."""
        path = self.manifest.files[piece.file].path
        try:
            return self.folder.open(path, flags)
        except OSError as error:
            raise DamagedError(f"{self.folder.path / path}: {error.strerror or error}") from error

    def where(self, piece: Slice) -> str:
        """Return the path of the file that holds a slice, for messages."""
        return str(self.folder.path / self.manifest.files[piece.file].path)


@dataclass(frozen=True)
class _Twin:
    """A slice of another checkpoint with the same checksum and size."""

    source: _OpenCheckpoint
    piece: Slice


_Twins = dict[tuple[str, int], list[_Twin]]


def restore_slices(path: Path, others: list[Path]) -> bool:
    """Rewrite each damaged slice of the checkpoint `path` from a twin in the checkpoints `others`. Returns whether any
    was rewritten.

    Returns False also when the manifest or a header of `path` is damaged, or one of its slices cannot be read. If a
    file with a damaged slice has several hard links, `path` first gets a copy of its own, and the other links keep what
    they hold. Raises OSError when a file cannot be written.
    """
    try:
        source = _OpenCheckpoint(path)
        twins = _twins_by_checksum(others)
        return sum([_restore_slice(source, tensor, piece, twins) for tensor, piece in source.slices()]) > 0
    except CheckpointError:
        return False  # without its manifest or headers nothing can be said about it; it is set aside


def _twins_by_checksum(others: list[Path]) -> _Twins:
    """Return the slices of the checkpoints `others` by (checksum, number of bytes); checkpoints that cannot be opened
    are left out.

    All slices with the same key are listed, as some may be damaged.
    """
    found: _Twins = {}
    for path in others:
        try:
            source = _OpenCheckpoint(path)
        except CheckpointError:
            continue
        for tensor, piece in source.slices():
            key = (piece.checksum, piece.length * ITEMSIZE[tensor.dtype])
            found.setdefault(key, []).append(_Twin(source, piece))
    return found


def _restore_slice(source: _OpenCheckpoint, tensor: TensorEntry, piece: Slice, twins: _Twins) -> bool:
    """Verify the slice `piece` of `tensor` in `source` and, if it is damaged, rewrite it from the first good one of its
    `twins`. Returns whether it was rewritten.

    Raises DamagedError when the slice cannot be read, OSError when it cannot be written.
    """
    nbytes, begin = piece.length * ITEMSIZE[tensor.dtype], source.begin(piece)
    fd = source.open(piece)
    try:
        if scan_fd(fd, begin, nbytes, source.where(piece)) == piece.checksum:
            return False
    finally:
        os.close(fd)
    return any(_copy_slice(twin, source, piece, nbytes) for twin in twins.get((piece.checksum, nbytes), []))


def _copy_slice(twin: _Twin, target: _OpenCheckpoint, piece: Slice, nbytes: int) -> bool:
    """Overwrite slice `piece` of `target`, of `nbytes` bytes, with the bytes of `twin`, if these are good, and return
    True. Returns False, with nothing written, when the twin is damaged or cannot be read.

    Raises OSError when writing fails.
    """
    try:
        begin, fd = twin.source.begin(twin.piece), twin.source.open(twin.piece)
        try:
            if scan_fd(fd, begin, nbytes, twin.source.where(twin.piece)) != piece.checksum:
                return False
            _overwrite(target, piece, fd, begin, nbytes)
        finally:
            os.close(fd)
    except CheckpointError:
        return False
    return True


def _overwrite(target: _OpenCheckpoint, piece: Slice, source: int, begin: int, nbytes: int) -> None:
    """Overwrite slice `piece` of `target` with `nbytes` bytes of the open file `source` from byte `begin` on; they are
    on disk on return.

    A read-only file is made writable meanwhile. Raises OSError, or DamagedError when the slice's file cannot be opened.
    """
    own = _open_unshared(target, piece)
    try:
        mode = os.fstat(own).st_mode
        os.fchmod(own, stat.S_IMODE(mode) | stat.S_IWUSR)
        try:
            writable = target.open(piece, os.O_RDWR)
            try:
                _copy_range(writable, target.begin(piece), source, begin, nbytes)
            finally:
                os.close(writable)
        finally:
            os.fchmod(own, stat.S_IMODE(mode))
    finally:
        os.close(own)


def _open_unshared(target: _OpenCheckpoint, piece: Slice) -> int:
    """Open for writing the file that holds a slice, after making sure that it has no other hard link, and return its
    descriptor, for the caller to close.

    A file that has others is first replaced by a copy of its own. Raises OSError with the file's name, or DamagedError.
    """
    own = target.open(piece)
    if os.fstat(own).st_nlink == 1:
        return own
    os.close(own)
    try:
        target.folder.give_own_copy(target.manifest.files[piece.file].path)
    except OSError as error:
        raise OSError(error.errno, f"copying a linked file: {error.strerror}", target.where(piece)) from error
    return target.open(piece)


def _copy_range(target: int, position: int, source: int, begin: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between open files, from byte `begin` of `source` to byte `position` of `target`, and wait
    until they are on disk."""
    scratch = memoryview(bytearray(min(SCAN_BYTES, nbytes)))
    for done in range(0, nbytes, SCAN_BYTES):
        part = scratch[: min(SCAN_BYTES, nbytes - done)]
        read_fd(source, begin + done, part, "the copy")
        at = position + done
        while part:
            written = os.pwrite(target, part, at)
            part, at = part[written:], at + written
    os.fsync(target)
