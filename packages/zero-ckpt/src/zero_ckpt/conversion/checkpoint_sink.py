"""Write all tensors of a source, optimizer state included, as a checkpoint of this package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..catalog import examine
from ..errors import CheckpointError
from ..latest import check_tag, is_tag, read_latest
from ..saving import save_sharded
from ..types import ITEMSIZE, Interval, numel
from .checks import refuse_existing, require_folder
from .deepspeed_folder import names_whole_deepspeed
from .sources import Progress, Source, pieces


def write_checkpoint(source: Source, root: Path, *, progress: Progress, overwrite: bool = False) -> Path:
    """Save all tensors of `source` as checkpoint `<root>/step<step>`, complete or not at all, and return that path. One
    piece is in memory at a time.

    `latest` is pointed to it, unless that names a checkpoint of a later step, or a whole one of DeepSpeed. `progress`
    is called with the bytes of each piece. Raises CheckpointError when anything is at that path, unless `overwrite`,
    when a parent is no folder, and when reading or writing fails; an earlier checkpoint is untouched then.
    """
    refuse_existing(root / f"step{source.step}", overwrite)
    require_folder(root / f"step{source.step}")
    return save_sharded(
        root,
        check_tag(f"step{source.step}"),
        _intervals(source, progress),
        step=source.step,
        aliases=dict(source.aliases),
        client_state=source.client_state,
        frozen=source.frozen,
        replace_existing=overwrite,
        save_latest=not _must_leave_latest(root, source.step),
    )


def _must_leave_latest(root: Path, step: int) -> bool:
    """Return whether `latest` of a root names a checkpoint of a later step than `step`, or a whole one of DeepSpeed."""
    try:
        tag = read_latest(root)
    except CheckpointError:
        return False
    if names_whole_deepspeed(root, tag, checksums=False):
        return True
    manifest = None if tag is None or not is_tag(tag) else examine(tag, root / tag).manifest
    return manifest is not None and manifest.step > step


def _intervals(source: Source, progress: Progress) -> Iterator[Interval]:
    """Yield the intervals of all tensors of a source, piece by piece; their data functions read a piece and call
    `progress` with its bytes."""
    for (name, kind), tensor in source.tensors.items():
        shape, itemsize = tuple(tensor.shape), ITEMSIZE[tensor.dtype]
        for offset, length in pieces(source, name, kind, numel(shape), itemsize):
            reader = _Reader(source, progress, name, kind, offset, length * itemsize)
            yield Interval(name, kind, shape, tensor.dtype, offset, reader, length)
        if numel(shape) == 0:
            yield Interval(name, kind, shape, tensor.dtype, 0, b"")


class _Reader:
    """The data function of an interval: reads one piece of a tensor when it is called, and reports its bytes.

    `place` is (name, kind, first element, number of bytes).
    """

    def __init__(self, source: Source, progress: Progress, *place: Any) -> None:
        self._source, self._progress, self._place = source, progress, place

    def __call__(self) -> bytearray:
        """Read the piece into new memory, report its bytes as progress, and return it."""
        name, kind, offset, nbytes = self._place
        out = bytearray(nbytes)
        self._source.read_into(name, kind, offset, out)
        self._progress(nbytes)
        return out
