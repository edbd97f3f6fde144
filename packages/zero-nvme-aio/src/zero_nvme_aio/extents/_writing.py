"""Writes into the open generation of a store: each goes to the allocation it has there, or to another path if that one
fails. A stripe is the number of a path, from 0. A described buffer is memory as `_buffers` returns it: a flat
memoryview of bytes, or (address, bytes, owner).
"""

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
        """Start writing described buffers, `items`, to an `allocation` of a name that `allocator` made; return the
        written range and its request. If the path fails, now or before the request has ended, the range moves to
        another one.
        """
        nbytes = allocation.end - allocation.begin
        piece = WrittenRange(
            name, allocation.begin, nbytes, files.generation, allocation.stripe, allocation.file_offset
        )
        request: Request | PathWrite = self._submit(allocator, files, piece, items)
        if isinstance(request, Request) and len(self._paths) > 1:
            again = partial(self._restart, allocator, files, piece, items)
            request = PathWrite(request, self._paths, piece.stripe, again)
        piece.request = request
        return piece, request

    def leave_path_of(self, files: GenerationFiles, error: OSError) -> int:
        """Stop writing to the path of the file that `error`, by its filename, is about, one of the open generation's
        `files`; return its stripe. Raise `error` itself if it is about none of them, is not about the path's drive, or
        if no other path can be written to.
        """
        stripe = files.stripe_of(error.filename)
        if stripe is None or not self._paths.refuse(stripe, error):
            raise error
        files.spoiled.add(stripe)
        return stripe

    def _submit(self, allocator: Allocator, files: GenerationFiles, piece: WrittenRange, items: list[Any]) -> Request:
        """Start writing described buffers to the range's present allocation and return the request; if the file there
        cannot be made, or has no room, use another allocation. Raises the error if no path is left.
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

    def _restart(
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
        """Start the write of `piece` again on another path, after the request of `transfer` has `failed` with `error`,
        and put the new request into `transfer`; do nothing if another thread has done that. Return whether the write
        continues, so False if no path is left. Without `block`, also return True, having done nothing, while another
        thread holds the store's lock.
        """
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
    """Give a written range, whose write failed, a new allocation on a path that can be written to: change its stripe
    and file offset.
    """
    allocation = allocator.reallocate(piece.name, piece.begin, piece.end)
    piece.stripe, piece.file_offset = allocation.stripe, allocation.file_offset
