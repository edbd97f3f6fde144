"""Reads of covered ranges (bytes of a name that are current in one written range), verified on request. A described
buffer is memory as `_buffers` returns it: a flat memoryview of bytes, or (address, bytes, owner).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import _buffers
from .._file import File
from .._memory import AlignedBuffer
from .._request import Request
from ..errors import ChecksumError
from ._files import GenerationFiles
from ._paths import StorePaths
from ._ranges import Covered, WrittenRange
from ._transfer import PathRead

__all__ = ["Reading", "check_checksum"]


class Reading:
    """Collects the requests of one read of a name, and the checks to run when they have ended; the caller holds the
    store's lock.

    `paths`: those of the store, which count the bytes. `generations`: the files of each generation, by its number.
    `verify`: compare recorded checksums. `requests` and `checks` become those of the `StoreRequest`.
    """

    def __init__(self, paths: StorePaths, generations: Mapping[int, GenerationFiles], verify: bool) -> None:
        self._paths = paths
        self._generations = generations
        self._verify = verify
        self.requests: list[Request | PathRead] = []
        self.checks: list[Callable[[], None]] = []

    def start(self, covered: Covered, items: list[Any]) -> Request | PathRead:
        """Start reading one covered range into `items`, described buffers of its size, and return the request. With
        `verify`, and if a checksum is recorded, a function is added to `checks`, which must run before the bytes are
        used.
        """
        piece = covered.piece
        files = self._generations[piece.generation]
        file = files.file(piece.stripe)
        offset = piece.file_offset + covered.begin - piece.begin
        whole = (covered.begin, covered.end) == (piece.begin, piece.end)
        if not self._verify or not piece.checksum:
            request = files.submit(False, piece.stripe, items, offset, False)
        elif whole:
            request = files.submit(False, piece.stripe, items, offset, True)
            self.checks.append(lambda: check_checksum(file, piece, request))
        else:
            request = self._read_whole(files, covered, items)
        self._paths.started(piece.stripe, request, request.nbytes, write=False)
        several = len(self._paths) > 1
        self.requests.append(PathRead(request, self._paths, piece.stripe) if several else request)
        return self.requests[-1]

    def _read_whole(self, files: GenerationFiles, covered: Covered, items: list[Any]) -> Request:
        """Start reading the whole written range that a covered part lies in, into memory of its own, and return the
        request. A function added to `checks` verifies the whole range and copies the part into `items`.
        """
        # The checksum is of the whole extent, so the whole is read and the part asked for is copied out of it.
        piece = covered.piece
        scratch, file = AlignedBuffer(piece.nbytes), files.file(piece.stripe)
        request = files.submit(False, piece.stripe, _buffers.describe_all(scratch, True), piece.file_offset, True)

        def check_and_copy() -> None:
            """Verify the whole range, then copy the part that was asked for into the described buffers; ChecksumError
            if the bytes differ from those written.
            """
            check_checksum(file, piece, request)
            position = covered.begin - piece.begin
            for item in items:
                nbytes = _buffers.nbytes_of(item)
                _buffers.copy_into(item, memoryview(scratch)[position : position + nbytes])
                position += nbytes

        self.checks.append(check_and_copy)
        return request


def check_checksum(file: File, piece: WrittenRange, request: Request) -> None:
    """Raise ChecksumError, naming range, file and offset, unless `request`, an ended read of the range `piece` from
    `file`, has the checksum that is recorded for the range.
    """
    if request.checksum != piece.checksum:
        raise ChecksumError(
            f"'{piece.name}' bytes {piece.begin} to {piece.end}: '{file.path}' at offset {piece.file_offset} "
            f"does not hold what was written; expected {piece.checksum}, got {request.checksum}",
            path=file.path,
            offset=piece.file_offset,
            expected=piece.checksum,
            got=request.checksum,
        )
