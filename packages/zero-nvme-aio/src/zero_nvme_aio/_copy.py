"""Copying a file through the engine."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import deque

from ._engine import Engine, File, Request
from ._memory import AlignedBuffer
from ._tensors import sync_folder
from .errors import ChecksumError

__all__ = ["copy_file"]

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
    """Copies content and permissions; the target is complete or not there at all. Returns the bytes copied.

    `target` may be a folder. With `verify` what was written is read again and compared by checksum. Errors of the
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
                sums = _stream(engine, reading, writing, nbytes)
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


def _stream(engine: Engine, reading: File, writing: File, nbytes: int) -> list[str | None]:
    """Reads ahead while it writes; returns the checksum of every chunk."""
    buffers = [memoryview(AlignedBuffer(min(CHUNK_BYTES, max(nbytes, 1)))) for _ in range(CHUNKS)]
    begins = deque(range(0, nbytes, CHUNK_BYTES))
    free = deque(buffers)
    reads: deque[tuple[int, memoryview, Request]] = deque()
    writes: deque[tuple[memoryview, Request]] = deque()
    sums: list[str | None] = []
    while begins or reads or writes:
        while begins and free:
            begin, buffer = begins.popleft(), free.popleft()
            piece = buffer[: min(CHUNK_BYTES, nbytes - begin)]
            reads.append((begin, buffer, engine.read(reading, piece, begin, checksum=True)))
        if reads and (len(writes) < CHUNKS // 2 or not writes):
            begin, buffer, request = reads.popleft()
            length = request.wait()
            sums.append(request.checksum)
            writes.append((buffer, engine.write(writing, buffer[:length], begin)))
        else:
            buffer, request = writes.popleft()
            request.wait()
            free.append(buffer)
    return sums


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
