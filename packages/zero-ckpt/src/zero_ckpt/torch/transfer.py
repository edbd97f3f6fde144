"""Copy files of a directory between ranks that have directories of their own, in chunks of 4 MiB."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from ..commit import is_data_file
from ..errors import CheckpointError
from ..opened import Folder
from .buffers import tensor_buffer

_CHUNK_BYTES = 4 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_ONCE = 8  # transfers that one rank takes part in at a time


@dataclass(frozen=True)
class Transfer:
    """One file of `nbytes` bytes to be copied from rank `source` to rank `target` (ranks of the group)."""

    name: str
    nbytes: int
    source: int
    target: int


def exchange(directory: Path, transfers: Sequence[Transfer], group: dist.ProcessGroup) -> None:
    """Copy files between the ranks' own directories; collective, with the same `transfers` in the same order on every
    rank.

    `directory` is this rank's: it has the files of which the rank is a source, and gets those of which it is a target.
    A file appears under its name when all its bytes have arrived. A rank has at most 8 transfers of 4 MiB in memory at
    a time. Links are not followed, and only regular files are read. A rank that cannot read or write a file raises
    OSError or DamagedError naming it after all transfers, so that no other rank waits for it. Raises CheckpointError on
    every rank, before anything moves, for a name that no rank's file has.
    """
    for transfer in transfers:
        if not is_data_file(transfer.name):
            raise CheckpointError(f"{directory / transfer.name}: no rank writes a file of this name")
    rank = dist.get_rank(group)
    failures: list[Exception] = []
    for batch in batches(transfers):
        _move_batch([t for t in batch if rank in (t.source, t.target)], directory, rank, group, failures)
    if failures:
        raise failures[0]


def batches(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Yield the transfers in batches in which no rank has more than 8, as source or target; their order may change."""
    waiting = list(transfers)
    while waiting:
        load: dict[int, int] = {}
        batch, later = [], []
        for transfer in waiting:
            if max(load.get(transfer.source, 0), load.get(transfer.target, 0)) >= _AT_ONCE:
                later.append(transfer)
                continue
            batch.append(transfer)
            for end in {transfer.source, transfer.target}:
                load[end] = load.get(end, 0) + 1
        yield batch
        waiting = later


def _move_batch(
    transfers: Sequence[Transfer], directory: Path, rank: int, group: dist.ProcessGroup, failures: list[Exception]
) -> None:
    """Send and receive the chunks of one batch of transfers side by side; at the end each source sends whether it could
    read all of its file. A source that cannot read sends zeros, so that no rank waits.

    `transfers` are the batch's transfers of which `rank`, this rank, is source or target; every rank calls this for the
    same batches in the same order. Errors are appended to `failures`; a file with an error does not appear in
    `directory`.
    """
    files = {t.name: _Incoming(directory, t.name, failures) for t in transfers if t.target == rank}
    readable = {t.name: torch.ones(1, dtype=torch.uint8) for t in transfers}
    for begin in range(0, max((t.nbytes for t in transfers), default=0), _CHUNK_BYTES):
        works, arriving = [], []
        for transfer in transfers:
            chunk = torch.zeros(max(0, min(_CHUNK_BYTES, transfer.nbytes - begin)), dtype=torch.uint8)
            if not chunk.numel():
                continue
            if transfer.source == rank:
                try:
                    source = Folder(directory, follow=False)
                    source.read_at(transfer.name, begin, tensor_buffer(chunk), str(directory / transfer.name))
                except CheckpointError as error:
                    failures.append(error)
                    readable[transfer.name].zero_()
                works.append(dist.isend(chunk, group_dst=transfer.target, group=group))
            else:
                arriving.append((transfer.name, chunk))
                works.append(dist.irecv(chunk, group_src=transfer.source, group=group))
        for work in works:
            if work is not None:
                work.wait()
        for name, chunk in arriving:
            files[name].write(chunk)
    verdicts = [
        dist.isend(readable[t.name], group_dst=t.target, group=group)
        if t.source == rank
        else dist.irecv(readable[t.name], group_src=t.source, group=group)
        for t in transfers
    ]
    for verdict in verdicts:
        if verdict is not None:
            verdict.wait()
    for name, file in files.items():
        file.close(bool(readable[name]))


class _Incoming:
    """A file `name` of `directory` that arrives in chunks, called `.arriving-<name>` until it is complete.

    After an error, which is appended to `failures`, the file does not appear.
    """

    def __init__(self, directory: Path, name: str, failures: list[Exception]) -> None:
        self._target, self._partial = directory / name, directory / f".arriving-{name}"
        self._failures = failures
        self._file: BinaryIO | None = None
        try:
            self._partial.unlink(missing_ok=True)
            self._file = open(os.open(self._partial, _NEW_FILE, 0o600), "wb")
        except OSError as error:
            failures.append(error)

    def write(self, chunk: torch.Tensor) -> None:
        """Append the bytes of a chunk; does nothing after an error."""
        if self._file is None:
            return
        try:
            self._file.write(tensor_buffer(chunk))
        except OSError as error:
            self._fail(error)

    def close(self, complete: bool) -> None:
        """Give the file its name if it is `complete`, else remove it; does nothing after an error."""
        if self._file is None:
            return
        try:
            self._file.close()
            if complete:
                self._partial.rename(self._target)
            else:
                self._partial.unlink()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Append an error to `failures` and remove the partial file, if that is possible."""
        self._failures.append(error)
        self._file = None
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)
