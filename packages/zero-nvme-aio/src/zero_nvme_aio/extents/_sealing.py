"""Turns the open generation (the files written since the last seal) into one that is never written again. A stripe is
the number of a path of the store, from 0.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from .. import _buffers
from .._engine import Engine
from .._file import File
from .._memory import AlignedBuffer
from .._tensors import sync_folder
from ..errors import FormatError
from ._container import header_for
from ._files import GenerationFiles, StoreFolders
from ._index import SealedIndex, write_index
from ._ranges import Allocator, WrittenRange

__all__ = ["GenerationSync", "check_files", "seal_files"]


class GenerationSync:
    """Makes a completely written generation durable, once, on any thread.

    `engines`: one for each stripe, which wrote it; `folders`: the store's. `generation`: its number. `written`: the
    open files through which it was written, by stripe; they stay open until `close`. `sealed`: the index to write at
    the end.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        folders: StoreFolders,
        generation: int,
        written: Mapping[int, File],
        sealed: SealedIndex,
    ) -> None:
        self._engines, self._folders, self.generation = engines, folders, generation
        self._written, self._sealed = dict(written), sealed
        self._lock = threading.Lock()
        self._done = False
        self.error: Exception | None = None
        """The error that syncing raised. A second attempt could succeed although bytes were lost, so there is none."""

    def run(self) -> None:
        """Sync the files, then write the index, which makes the generation exist. Do nothing if that was done before,
        or after `close`. If the first call failed, raise its error again.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._done:
                return
            try:
                self._sync()
            except Exception as error:
                self.error = error
                raise
            self._done = True

    def _sync(self) -> None:
        """Sync the files and their folders, then write and sync the index, in another folder if the drive of one fails.
        Raises the error of the last folder.
        """
        for stripe, file in self._written.items():
            self._engines[stripe].sync(file)
        for stripe in self._written:
            sync_folder(os.path.dirname(self._folders.data_path(self.generation, stripe)))
        *others, last = self._folders.index_candidates(self.generation)
        for candidate in others:
            try:
                write_index(candidate, self._sealed)
            except OSError as error:
                if not self._folders.state.is_drives_error(error):
                    raise
                for left in (candidate, f"{candidate}.part"):
                    with suppress(OSError):
                        os.unlink(left)
            else:
                return
        write_index(last, self._sealed)

    def close(self) -> None:
        """Close the files by which the generation was written; `run` does nothing afterwards."""
        with self._lock:
            self._done = True
            for file in self._written.values():
                file.close()
            self._written.clear()


def seal_files(
    folders: StoreFolders,
    files: GenerationFiles,
    allocator: Allocator,
    pieces: Sequence[WrittenRange],
    declared: Mapping[str, tuple[int, str]],
    reserved: int,
) -> SealedIndex:
    """Complete the checksums, write the headers and make the files of the open generation read-only; return the index,
    which is not written yet.

    `folders`: name the files in the index. `allocator`: knows where each file ends. `pieces`: the ranges that hold the
    latest bytes of their names in this generation; those without a checksum get one. `declared`: (bytes, dtype) of each
    name that was declared. `reserved`: bytes free for a header at the start of each file. The index's kind is
    "safetensors" if all names were declared and the headers fit, else "raw". Raises AioError if reading
    or writing fails.
    """
    for stripe in files.spoiled:  # what was allocated last may not have been written
        own = [piece.file_offset + piece.nbytes for piece in pieces if piece.stripe == stripe]
        allocator.ends[stripe] = max(own, default=reserved)
    files.leave_out_spoiled({piece.stripe for piece in pieces})
    complete_checksums(files, pieces)
    headers, keys = _build_headers(files, allocator, pieces, declared, reserved)
    files.finish(allocator.ends, headers)
    return SealedIndex(
        generation=files.generation,
        kind="safetensors" if headers else "raw",
        stripes=len(folders.paths),
        files={s: (folders.data_name(files.generation, s), allocator.ends[s]) for s in files.stripes},
        pieces=sorted(pieces, key=lambda p: (p.name, p.begin)),
        keys=keys,
    )


def complete_checksums(files: GenerationFiles, pieces: Sequence[WrittenRange]) -> None:
    """Compute the checksum of every range of `pieces` that has none, by reading the range back: ranges written without
    one, and what remained of partly overwritten ranges. Raises the errors of the reads.
    """
    missing = [piece for piece in pieces if not piece.checksum]
    if not missing:
        return
    scratch = memoryview(AlignedBuffer(max(piece.nbytes for piece in missing)))
    for piece in missing:
        items = _buffers.describe_all(scratch[: piece.nbytes], True)
        request = files.submit(False, piece.stripe, items, piece.file_offset, True)
        request.wait()
        piece.checksum = request.checksum or ""


def check_files(folders: StoreFolders, sealed: SealedIndex, generation: int) -> None:
    """Raise FormatError unless `sealed`, read from the index of `generation`, is of that generation and of as many
    paths as the store has, and its files exist with the names and the lengths that it lists.
    """
    index = folders.index_path(generation)
    if sealed.generation != generation:
        raise FormatError(f"'{index}' is of generation {sealed.generation}", path=index)
    if sealed.stripes != len(folders.paths):
        raise FormatError(f"'{index}' is striped over {sealed.stripes} paths, got {len(folders.paths)}", path=index)
    for stripe, (name, nbytes) in sealed.files.items():
        if stripe >= sealed.stripes or name != folders.data_name(generation, stripe):
            raise FormatError(f"'{index}' names {name!r:.200} in path {stripe}", path=index)
        path = folders.data_path(generation, stripe)
        got = os.stat(path).st_size if os.path.exists(path) else -1
        if got < 0:
            _raise_for_other_order(folders, sealed)
        if got != nbytes:
            problem = "is missing" if got < 0 else f"has {got} bytes"
            raise FormatError(f"'{path}' {problem}, '{index}' says {nbytes}", path=path, expected=nbytes, got=got)


def _raise_for_other_order(folders: StoreFolders, sealed: SealedIndex) -> None:
    """Raise FormatError, with the right order in words, if all files of an index exist in the folders but not each in
    its stripe's; return if one does not exist at all.
    """
    held = {
        stripe: next((p for p in folders.paths if os.path.exists(os.path.join(p, name))), None)
        for stripe, (name, _) in sealed.files.items()
    }
    if None not in held.values():
        others = iter([path for path in folders.paths if path not in held.values()])
        order = [held[stripe] if stripe in held else next(others, "") for stripe in range(sealed.stripes)]
        said = ", ".join(f"'{path}'" for path in order)
        raise FormatError(f"the paths of the store '{folders.prefix}' had another order: {said}", path=order[0])


def _build_headers(
    files: GenerationFiles,
    allocator: Allocator,
    pieces: Sequence[WrittenRange],
    declared: Mapping[str, tuple[int, str]],
    reserved: int,
) -> tuple[dict[int, bytes], dict[tuple[str, int], str]]:
    """Return (safetensors header of each file, by stripe; entry name of each range, by (name, begin)); both are empty
    if a name was not declared or a header does not fit into the `reserved` bytes at the start of a file. `allocator`:
    knows where each file ends. `pieces`: the ranges in the files. `declared`: (bytes, dtype) by name.
    """
    if reserved == 0 or any(piece.name not in declared for piece in pieces):
        return {}, {}
    headers, keys = {}, {}
    for stripe in files.stripes:
        own = [piece for piece in pieces if piece.stripe == stripe]
        made = header_for(own, declared, reserved, allocator.ends[stripe])
        if made is None:
            return {}, {}
        headers[stripe] = made[0]
        keys.update(made[1])
    return headers, keys
