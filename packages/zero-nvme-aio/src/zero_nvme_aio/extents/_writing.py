"""Writes into the open generation of a store, each to the place it has there, or elsewhere if that path fails."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from .._request import Request
from ..errors import AioError, OpenError, TransferError
from ._files import GenerationFiles
from ._paths import StorePaths
from ._ranges import Allocation, Allocator, WrittenRange
from ._transfer import PathWrite

__all__ = ["Writing"]


class Writing:
    """Starts the writes of one store over `paths`; the caller holds the store's `lock`. `checksums`: record them during
    the transfer.
    """

    def __init__(self, paths: StorePaths, lock: threading.RLock, checksums: bool) -> None:
        self._paths, self._lock, self._checksums = paths, lock, checksums

    def start(
        self, allocator: Allocator, files: GenerationFiles, name: str, allocation: Allocation, items: list[Any]
    ) -> tuple[WrittenRange, Request | PathWrite]:
        """Start writing described buffers, `items`, to a place of a name that `allocator` gave; return the range and
        its request. If the path fails, now or later, the range gets a place on another one.
        """
        nbytes = allocation.end - allocation.begin
        piece = WrittenRange(
            name, allocation.begin, nbytes, files.generation, allocation.stripe, allocation.file_offset
        )
        request: Request | PathWrite = self._submit(allocator, files, piece, items)
        if isinstance(request, Request) and len(self._paths) > 1:
            again = partial(self._move, allocator, files, piece, items)
            request = PathWrite(request, self._paths, piece.stripe, again)
        piece.request = request
        return piece, request

    def leave_path_of(self, files: GenerationFiles, error: OSError) -> int:
        """Stop writing to the path of that file of the open generation that an error is about, and return its stripe;
        raise the error if there is none, and if no other path can be written to.
        """
        stripe = files.stripe_of(error.filename)
        if stripe is None or not self._paths.refuse(stripe, error):
            raise error
        files.spoiled.add(stripe)
        return stripe

    def _submit(self, allocator: Allocator, files: GenerationFiles, piece: WrittenRange, items: list[Any]) -> Request:
        """Start writing a range at its place, or at another one if the file there cannot be made, and return the
        request. Raises the error of making it if no path is left.
        """
        while True:
            try:
                request = files.submit(True, piece.stripe, items, piece.file_offset, self._checksums)
            except (OpenError, TransferError) as error:
                if not self._paths.refuse(piece.stripe, error):
                    raise
                _reallocate(allocator, piece)
                continue
            self._paths.started(piece.stripe, request, piece.nbytes, write=True)
            return request

    def _move(
        self,
        allocator: Allocator,
        files: GenerationFiles,
        piece: WrittenRange,
        items: list[Any],
        transfer: PathWrite,
        failed: Request,
        error: AioError,
        *,
        block: bool,
    ) -> bool:
        """Start the failed write of a range again on another path; a `Move`."""
        if not self._lock.acquire(blocking=block):
            return True
        try:
            if transfer.request is not failed:
                return True
            files.spoiled.add(piece.stripe)
            if not self._paths.refuse(piece.stripe, error):
                return False
            _reallocate(allocator, piece)
            transfer.request = self._submit(allocator, files, piece, items)
            transfer.stripe = piece.stripe
        except (OpenError, TransferError):
            return False
        finally:
            self._lock.release()
        return True


def _reallocate(allocator: Allocator, piece: WrittenRange) -> None:
    """Give a range another place in the open generation, on a path that can be written to."""
    allocation = allocator.reallocate(piece.name, piece.begin, piece.end)
    piece.stripe, piece.file_offset = allocation.stripe, allocation.file_offset
