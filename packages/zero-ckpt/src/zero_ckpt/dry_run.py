"""Saves and loads of which only one rank exists, over tensors without memory, and files that have no content.

[Note: dry-run saves] For a dry run, which has one rank of many and no bytes. Everything that decides what is written
runs as ever: the intervals, the plan, the headers, the commit. A save in the background is done before its call
returns, and copies nothing. Only the ends differ: the other ranks hold exactly what this one lacks and always succeed;
tensors read as zeros; the rank's file gets its length. This rank leads, whatever its number. The manifest has this
rank's slices only, so that such a checkpoint cannot be opened.

[Note: dry-run loads] A load reads from a manifest that the dry run is given, merged from those of dry-run saves.
Everything that decides what is read runs as ever; the reads themselves are counted and touch neither files nor memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .manifest import Manifest
from .plain import pack
from .types import Coordinator, numel

_HEADS = "heads"


class CheckpointDryRun:
    """The state of dry-run saves and loads: it stands in for memory and counts what real ones would use.

    `manifest`: describes the checkpoint that loads read; None if there is nothing to load.

    Attributes:
        copied_nbytes: host memory for the copies that background saves make, kept for the next save.
        message_nbytes: host memory of the largest exchange between the ranks: a message of each, padded to the longest.
        manifest: that of the last save, with this rank's slices only; loads read the checkpoint that it describes.
        read_nbytes: bytes of data files that loads read.
        scratch_nbytes: the most host memory into which a load reads slices of which it needs a part.
    """

    def __init__(self, manifest: Manifest | None) -> None:
        self.copied_nbytes = self.message_nbytes = self.read_nbytes = self.scratch_nbytes = 0
        self.manifest = manifest
        self._blocks: list[mmap.mmap] = []  # a view of an earlier one may be in use

    def address(self, nbytes: int) -> int:
        """Return the address of `nbytes` zeros, valid while this object lives; reading them takes no memory."""
        if not self._blocks or len(self._blocks[-1]) < nbytes:
            self._blocks.append(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._blocks[-1]))


_DRY_RUN: ContextVar[CheckpointDryRun | None] = ContextVar("zero_ckpt_dry_run", default=None)


@contextmanager
def dry_run_checkpoints(manifest: Manifest | None = None) -> Iterator[CheckpointDryRun]:
    """Make the saves and loads inside the `with` statement dry runs (see [Note: dry-run saves] and [Note: dry-run
    loads]), and yield the object that counts their bytes.

    `manifest` describes the checkpoint that loads read, None without loads. Threads that are started inside save and
    load for real.
    """
    dry_run = CheckpointDryRun(manifest)
    token = _DRY_RUN.set(dry_run)
    try:
        yield dry_run
    finally:
        _DRY_RUN.reset(token)


def current_dry_run() -> CheckpointDryRun | None:
    """Return the dry run that the current context is in; None outside of `dry_run_checkpoints`."""
    return _DRY_RUN.get()


class DryRunSink:
    """A `FileSink` that counts the bytes written and makes `path` a file of `nbytes` bytes without content.

    Raises FileExistsError when there is something at `path`.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes, self._position = path, nbytes, 0
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def write(self, data: memoryview) -> None:
        """Count the bytes of `data` without writing them."""
        self._position += data.nbytes

    def drain(self) -> None:
        """Return at once, as no transfer is under way."""

    def finish(self) -> None:
        """Give the file its length. Raises CheckpointError unless as many bytes were written as the constructor's
        `nbytes` says."""
        if self._position != self._nbytes:
            raise CheckpointError(f"{self._path}: expected {self._nbytes} bytes, got {self._position}")
        os.truncate(self._path, self._nbytes)

    def abort(self) -> None:
        """Do nothing: the file is not open."""


class DryRunRanks:
    """A `Coordinator` in which this rank is real and the others are imagined: they hold the elements that this rank
    lacks, and always succeed.

    Rank and world size are those of the coordinator `given`, on which nothing else is called. The size of the largest
    exchange is noted in `dry_run`.
    """

    def __init__(self, given: Coordinator, dry_run: CheckpointDryRun) -> None:
        self.rank, self.world_size = given.rank, given.world_size
        self._dry_run = dry_run

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the answers of all ranks to one step of a save, each a pair [problem or None, result], as if the other
        ranks succeeded.

        `obj` is this rank's answer (see `coordination.run_on_all_ranks`). Where its result describes this rank's
        intervals, the next rank is taken to hold all elements of their tensors that no interval covers. Notes the bytes
        of the exchange.
        """
        problem, result = obj
        other: Any = None
        rest: Any = None
        if isinstance(result, dict) and _HEADS in result:
            other, rest = {**result, _HEADS: []}, {**result, _HEADS: rest_of(result[_HEADS])}
        answers = [[None, other] for _ in range(self.world_size)]
        answers[self.rank] = [problem, result]
        if self.world_size > 1:
            answers[(self.rank + 1) % self.world_size] = [None, rest]
            own, *others = (len(pack(answer)) for answer in (obj, [None, rest], [None, other]))
            nbytes = own + (self.world_size + 1) * max(own, *others)
            self._dry_run.message_nbytes = max(self._dry_run.message_nbytes, nbytes)
        return answers

    def barrier(self) -> None:
        """Return at once, as there are no other ranks to wait for."""


def rest_of(heads: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return heads for all elements that no head in `heads` covers, of the tensors that `heads` name.

    A head describes an interval as (name, kind, shape, dtype, offset, length, linked): `length` elements from flat
    element `offset` on; `linked` says that they lie in a file already. The returned heads are not linked.
    """
    tensors: dict[tuple[str, str], list[Sequence[Any]]] = {}
    for head in heads:
        tensors.setdefault((head[0], head[1]), []).append(head)
    found = []
    for (name, kind), own in tensors.items():
        shape, dtype = own[0][2], own[0][3]
        position = 0
        for begin, length in sorted((head[4], head[5]) for head in own):
            if begin > position:
                found.append([name, kind, shape, dtype, position, begin - position, False])
            position = begin + length
        if position < numel(tuple(shape)):
            found.append([name, kind, shape, dtype, position, numel(tuple(shape)) - position, False])
    return found
