"""Copies of files, or of ranges of them, through the engine and a ring of four buffers in memory."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ._engine import Engine
from ._file import File
from ._memory import AlignedBuffer
from ._request import Request
from ._tensors import sync_folder
from .errors import ChecksumError

__all__ = ["CopyRange", "FileRange", "copy_file", "copy_ranges"]

PAGE = 4096
CHUNK_BYTES = 16 << 20
CHUNKS = 4


def copy_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    engine: Engine,
    sync: bool = True,
    verify: bool = False,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Copy a file's content and permissions and return the bytes copied; a target that exists is replaced.

    `target` may be a folder, into which the file is copied under its own name. A copy that fails leaves the target as
    it was. `sync`: the copy is on stable storage on return. `verify`: read the copy back and compare checksums.
    `progress` is called with the bytes of each chunk when it is written, and again when it is read back. Raises the
    errors of the engine, ChecksumError.
    """
    origin, goal = os.fspath(source), os.fspath(target)
    if os.path.isdir(goal):
        goal = os.path.join(goal, os.path.basename(origin))
    scratch = f"{goal}.{secrets.token_hex(4)}.part"
    with engine.open(origin) as reading:
        nbytes = reading.size
        try:
            with engine.open(scratch, "rw") as writing:
                copied = CopyRange(FileRange(engine, reading, 0), FileRange(engine, writing, 0), nbytes)
                checksums = copy_ranges([copied], progress=progress)
                if sync:
                    engine.sync(writing)
                if verify:
                    _verify(engine, writing, nbytes, checksums, progress)
            shutil.copymode(origin, scratch)
            os.replace(scratch, goal)
        except BaseException:
            if os.path.exists(scratch):
                os.unlink(scratch)
            raise
    if sync:
        sync_folder(os.path.dirname(goal) or ".")
    return nbytes


class FileRange(NamedTuple):
    """Bytes from `offset` of an open file on, which `engine` opened."""

    engine: Engine
    file: File
    offset: int


class CopyRange(NamedTuple):
    """`nbytes` that are to be copied from where `source` begins to where `target` begins."""

    source: FileRange
    target: FileRange
    nbytes: int


def copy_ranges(
    ranges: Sequence[CopyRange],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int], None] | None = None,
) -> list[str | None]:
    """Copy ranges chunk by chunk, reading ahead of the writes; return the checksums of the chunks as read, in order,
    once all are written. Nothing is synced.

    A chunk ends at a multiple of ``chunk_bytes`` in the source; `progress` is called with its bytes when it is written.
    Takes memory for four chunks meanwhile. Raises the errors of the engine, EndOfFileError if a source is shorter than
    its range; parts of the target are then written.
    """
    chunks = deque(chunk for copied in ranges for chunk in _chunks(copied, chunk_bytes))
    largest = max((chunk.source.offset % PAGE + chunk.nbytes for chunk in chunks), default=1)
    free = deque(memoryview(AlignedBuffer(largest)) for _ in range(CHUNKS))
    reads: deque[tuple[CopyRange, memoryview, memoryview, Request]] = deque()
    writes: deque[tuple[memoryview, int, Request]] = deque()
    checksums: list[str | None] = []
    while chunks or reads or writes:
        while chunks and free:
            chunk, buffer = chunks.popleft(), free.popleft()
            # At the same distance from a page boundary as in the file, so that direct I/O needs no copy.
            engine, file, offset = chunk.source
            piece = buffer[offset % PAGE :][: chunk.nbytes]
            reads.append((chunk, buffer, piece, engine.read(file, piece, offset, checksum=True)))
        if reads and (len(writes) < CHUNKS // 2 or not writes):
            chunk, buffer, piece, request = reads.popleft()
            request.wait()
            checksums.append(request.checksum)
            engine, file, offset = chunk.target
            writes.append((buffer, chunk.nbytes, engine.write(file, piece, offset)))
        else:
            buffer, nbytes, request = writes.popleft()
            request.wait()
            free.append(buffer)
            if progress is not None:
                progress(nbytes)
    return checksums


def _chunks(copied: CopyRange, chunk_bytes: int) -> Iterator[CopyRange]:
    """Yield consecutive parts of a range, each up to the next multiple of `chunk_bytes` in the source file."""
    source, target = copied.source, copied.target
    done = 0
    while done < copied.nbytes:
        begin = source.offset + done
        end = min(source.offset + copied.nbytes, (begin // chunk_bytes + 1) * chunk_bytes)
        yield CopyRange(source._replace(offset=begin), target._replace(offset=target.offset + done), end - begin)
        done += end - begin


def _verify(
    engine: Engine, file: File, nbytes: int, checksums: list[str | None], progress: Callable[[int], None] | None
) -> None:
    """Read the first `nbytes` of a copied file back in chunks of 16 MiB. ChecksumError unless they have these
    `checksums`, those of the source's chunks in order. `progress`, if not None, is called with the bytes of each chunk.
    """
    buffer = memoryview(AlignedBuffer(min(CHUNK_BYTES, max(nbytes, 1))))
    for number, expected in enumerate(checksums):
        begin = number * CHUNK_BYTES
        request = engine.read(file, buffer[: min(CHUNK_BYTES, nbytes - begin)], begin, checksum=True)
        request.wait()
        if request.checksum != expected:
            raise ChecksumError(
                f"the copy '{file.path}' differs at offset {begin}",
                path=file.path,
                offset=begin,
                expected=expected,
                got=request.checksum,
            )
        if progress is not None:
            progress(min(CHUNK_BYTES, nbytes - begin))
