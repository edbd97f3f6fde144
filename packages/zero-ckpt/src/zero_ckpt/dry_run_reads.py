"""A checkpoint of dry-run saves, whose reads are counted; see [Note: dry-run loads] in `dry_run`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .dry_run import CheckpointDryRun
from .errors import NotFoundError
from .manifest import FileEntry, Manifest, Slice, TensorEntry
from .opened import Folder
from .plan import MAX_SLICE_BYTES
from .reader import Checkpoint, OpenReport, ReadRequest, SliceCopy

_DRY_RUN_TAG = "dry-run"


class DryRunCheckpoint(Checkpoint):
    """A `Checkpoint` without files, as the manifest of the dry run `dry_run` describes it; its reads are counted in
    `dry_run`, and buffers keep what they hold. `root`: any directory.

    Raises NotFoundError when the dry run has no manifest, and on a read of elements of ranks whose saves were not part
    of the dry run.
    """

    def __init__(self, root: Path, dry_run: CheckpointDryRun) -> None:
        if dry_run.manifest is None:
            raise NotFoundError(f"{root}: there is no checkpoint to load in this dry run")
        tag = dry_run.manifest.tag or _DRY_RUN_TAG
        super().__init__(root, tag, dry_run.manifest, OpenReport(tag, tag), Folder(root, follow=True))
        self._dry_run = dry_run
        self._counting = threading.Lock()
        self._begun_files: set[int] = set()
        self._scratch: list[int] = []

    def read_many(self, requests: Iterable[ReadRequest], *, verify: bool = True, threads: int = 4) -> None:
        """Count the bytes that `Checkpoint.read_many` would read, and the host memory that `threads` threads would read
        into at a time.

        Both are added to the dry run: `read_nbytes` grows, and `scratch_nbytes` is the largest so far. No buffer is
        filled. `verify` changes nothing.
        """
        self._scratch.clear()
        super().read_many(requests, verify=verify, threads=threads)
        most = sum(sorted(self._scratch, reverse=True)[:threads])
        self._dry_run.scratch_nbytes = max(self._dry_run.scratch_nbytes, most)

    def _slice_copies(self, request: ReadRequest) -> list[SliceCopy]:
        """Return the copies that a real read would make for a request, one for each slice that it overlaps. Raises
        NotFoundError when the manifest has no slice for some of the elements."""
        found = super()._slice_copies(request)
        if sum(job.view.nbytes for job in found) != memoryview(request.out).nbytes:
            raise NotFoundError(
                f"{request.name!r} ({request.kind}): elements from {request.offset} on are those of a rank whose save "
                "was not part of the dry run"
            )
        return found

    def _read_directly(self, jobs: list[SliceCopy]) -> None:
        """Count the whole slices of `jobs`, which would be read with direct I/O."""
        for job in jobs:
            self._count(job, job.slice_nbytes)

    def _copy_from_slice(self, jobs: Sequence[SliceCopy], verify: bool) -> None:
        """Count the bytes that jobs of one slice would read, and the bytes of scratch for a slice that is wanted in
        part."""
        first, parts = jobs[0], sum(job.view.nbytes for job in jobs)
        if verify and first.slice_nbytes > MAX_SLICE_BYTES and not all(job.is_whole for job in jobs):
            place = (first.piece.file, first.piece.key, first.piece.begin)
            self._count(first, parts + (0 if place in self._large else first.slice_nbytes))
            self._large.add(place)
        elif verify:
            self._count(first, first.slice_nbytes, 0 if first.is_whole else first.slice_nbytes)
        else:
            self._count(first, parts)

    def _count(self, job: SliceCopy, nbytes: int, scratch: int = 0) -> None:
        """Count `nbytes` as read from the file of a job, the file's header too the first time, and `scratch` bytes of
        host memory for the read."""
        with self._counting:
            if job.piece.begin is None and job.piece.file not in self._begun_files:
                self._begun_files.add(job.piece.file)
                nbytes += self.manifest.files[job.piece.file].header_nbytes
            self._dry_run.read_nbytes += nbytes
            self._scratch.append(scratch)


def merge_manifests(parts: Sequence[Manifest]) -> Manifest:
    """Return the manifest of one checkpoint from `parts`, at least one manifest, each of which has the slices of one
    rank.

    Everything else is taken from the first, except that `rank_state` is empty: a dry run leaves the ranks' own states
    (random generators) alone.
    """
    files: list[FileEntry] = []
    tensors: dict[tuple[str, str], TensorEntry] = {}
    slices: dict[tuple[str, str], list[Slice]] = {}
    for part in parts:
        for tensor in part.tensors:
            key = tensor.name, tensor.kind
            tensors.setdefault(key, tensor)
            slices.setdefault(key, []).extend(replace(piece, file=piece.file + len(files)) for piece in tensor.slices)
        files += part.files
    merged = [
        replace(tensor, slices=tuple(sorted(slices[key], key=lambda piece: piece.offset)))
        for key, tensor in tensors.items()
    ]
    return replace(parts[0], files=tuple(files), tensors=tuple(merged), rank_state=())
