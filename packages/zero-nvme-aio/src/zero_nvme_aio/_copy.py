"""Copying files, or ranges of them, through the engine: memory holds four chunks at a time."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._engine import Engine
from ._file import File
from ._memory import AlignedBuffer
from ._request import Request
from ._tensors import sync_folder
from .errors import ChecksumError

__all__ = ["CopyRange", "copy_file", "copy_spans"]

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
) -> int:
    """Copy a file's content and permissions and return the bytes copied; the target is either complete or absent.

    `target` may be a folder. With `verify` the copy is read back and compared by checksum. Raises the errors of the
    engine.
    """
    origin, goal = os.fspath(source), os.fspath(target)
    if os.path.isdir(goal):
        goal = os.path.join(goal, os.path.basename(origin))
    scratch = f"{goal}.{secrets.token_hex(4)}.part"
    with engine.open(origin) as reading:
        nbytes = reading.size
        try:
            with engine.open(scratch, "rw") as writing:
                sums = copy_spans(engine, [CopyRange(reading, 0, writing, 0, nbytes)])
                if sync:
                    engine.sync(writing)
                if verify:
                    _verify(engine, writing, nbytes, sums)
            shutil.copymode(origin, scratch)
            os.replace(scratch, goal)
        except BaseException:
            if os.path.exists(scratch):
                os.unlink(scratch)
            raise
    if sync:
        sync_folder(os.path.dirname(goal) or ".")
    return nbytes


class CopyRange(NamedTuple):
    """`nbytes` at `offset` of one file that go to `target_offset` of another."""

    source: File
    offset: int
    target: File
    target_offset: int
    nbytes: int


def copy_spans(engine: Engine, spans: Sequence[CopyRange], *, chunk_bytes: int = CHUNK_BYTES) -> list[str | None]:
    """Copy ranges through a ring of four buffers, reading ahead of the writes; return the checksum of every chunk.

    Raises the errors of the engine, EndOfFileError if a source is shorter than its range.
    """
    chunks = deque(chunk for span in spans for chunk in _chunks(span, chunk_bytes))
    largest = max((chunk.offset % PAGE + chunk.nbytes for chunk in chunks), default=1)
    free = deque(memoryview(AlignedBuffer(largest)) for _ in range(CHUNKS))
    reads: deque[tuple[CopyRange, memoryview, memoryview, Request]] = deque()
    writes: deque[tuple[memoryview, Request]] = deque()
    sums: list[str | None] = []
    while chunks or reads or writes:
        while chunks and free:
            chunk, buffer = chunks.popleft(), free.popleft()
            # As far from a page's begin as in the file, so that direct I/O needs no copy.
            piece = buffer[chunk.offset % PAGE :][: chunk.nbytes]
            reads.append((chunk, buffer, piece, engine.read(chunk.source, piece, chunk.offset, checksum=True)))
        if reads and (len(writes) < CHUNKS // 2 or not writes):
            chunk, buffer, piece, request = reads.popleft()
            request.wait()
            sums.append(request.checksum)
            writes.append((buffer, engine.write(chunk.target, piece, chunk.target_offset)))
        else:
            buffer, request = writes.popleft()
            request.wait()
            free.append(buffer)
    return sums


def _chunks(span: CopyRange, chunk_bytes: int) -> Iterator[CopyRange]:
    """Yield the range in pieces, cut at the source's multiples of `chunk_bytes`."""
    begin = span.offset
    while begin < span.offset + span.nbytes:
        end = min(span.offset + span.nbytes, (begin // chunk_bytes + 1) * chunk_bytes)
        yield CopyRange(span.source, begin, span.target, span.target_offset + begin - span.offset, end - begin)
        begin = end


def _verify(engine: Engine, file: File, nbytes: int, sums: list[str | None]) -> None:
    buffer = memoryview(AlignedBuffer(min(CHUNK_BYTES, max(nbytes, 1))))
    for number, expected in enumerate(sums):
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
