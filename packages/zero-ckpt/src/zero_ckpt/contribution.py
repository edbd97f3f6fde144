"""One rank's files of a checkpoint: linked ones, and one safetensors file with everything else.

A slice is a run of a tensor's elements in one file of the checkpoint; the plan of a save says which slices this rank
writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .linking import Copying, FileSlice, link_files
from .manifest import FileEntry
from .plan import MAX_SLICE_BYTES, PlannedSlice
from .types import ITEMSIZE, FileExtent, Interval
from .writer import OpenSink, WrittenSlice, file_order, write_rank_file


def write_contribution(
    directory: Path, rank: int, intervals: Sequence[Interval], pieces: Sequence[PlannedSlice], open_sink: OpenSink
) -> tuple[list[FileEntry], list[WrittenSlice]]:
    """Write the planned slices `pieces` into files in `directory` and wait until they are on disk. Returns (manifest
    entries of the files, the written slices).

    The slices' data come from `intervals`, to which `pieces` and written slices refer by index. `rank` is in the names
    of the files. Intervals whose data lie in a file already are linked where that is possible; all others go into one
    safetensors file, the last, which `open_sink` creates. Raises OSError with a file's name, or CheckpointError when an
    interval's data is not what it claims.
    """
    file_slices, in_memory = [], []
    for piece in file_order(intervals, pieces):
        interval = intervals[piece.index]
        if isinstance(interval.data, FileExtent):
            file_slices.append(FileSlice(piece, interval, interval.data))
        else:
            in_memory.append(piece)
    files, slices, left = link_files(directory, rank, file_slices)
    if not (in_memory or left):
        return files, slices
    copying = Copying(left)
    try:
        origin = [*range(len(intervals)), *copying.indices]
        every = [*intervals, *copying.intervals]
        copied = [
            part
            for index, interval in enumerate(copying.intervals, start=len(intervals))
            for part in _split_slice(
                PlannedSlice(index, interval.offset, interval.length or 0), ITEMSIZE[interval.dtype]
            )
        ]
        path = directory / f"rank-{rank:05d}.safetensors"
        entry, own = write_rank_file(path, every, [*in_memory, *copied], open_sink)
    finally:
        copying.close()
    slices += [replace(piece, index=origin[piece.index], file=len(files)) for piece in own]
    return [*files, entry], slices


def _split_slice(piece: PlannedSlice, itemsize: int) -> list[PlannedSlice]:
    """Split the planned slice `piece` into consecutive slices of at most `MAX_SLICE_BYTES` each; `itemsize` is the
    bytes per element."""
    step, end = MAX_SLICE_BYTES // itemsize, piece.offset + piece.length
    return [PlannedSlice(piece.index, at, min(step, end - at)) for at in range(piece.offset, end, step)]
