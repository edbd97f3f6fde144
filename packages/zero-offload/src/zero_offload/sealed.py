"""A store's state in files that nothing writes to any more."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ._protocols import Extent, Generation

__all__ = ["Sealed"]


@dataclass(frozen=True, eq=False)
class Sealed:
    """The files in which an update or a store keeps its state, made to last: nothing writes to these files any more.

    ``extents``: ``<fragment>/<kind>`` of an update, a shard's name of a store -> its pieces in order, each with file,
    offset, bytes and checksum. ``steps``: how often an update updated each fragment. ``resident``: fragments or shards
    with elements that are in host memory instead, to be read otherwise. ``files``: all files concerned, to be linked;
    they stay until `release`, links to them beyond it.
    """

    extents: Mapping[str, tuple[Extent, ...]]
    steps: Mapping[str, int]
    resident: frozenset[str]
    files: tuple[str, ...]
    _generations: list[Generation] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        extents: Mapping[str, Sequence[Extent]],
        generations: Sequence[Generation],
        *,
        steps: Mapping[str, int],
        resident: frozenset[str],
    ) -> Sealed:
        """``extents`` of a store that was just sealed; ``generations`` are those that hold them."""
        return cls(
            extents=MappingProxyType({name: tuple(found) for name, found in extents.items()}),
            steps=MappingProxyType(steps),
            resident=resident,
            files=tuple(sorted({extent.path for found in extents.values() for extent in found})),
            _generations=list(generations),
        )

    def link_to(self, folder: str | os.PathLike[str]) -> dict[str, str]:
        """Give every file a second name in ``folder``; returns the new paths by the ones in ``extents``.

        Nothing is copied where the folder is on the same file system; elsewhere the kernel copies, and the copy is on
        the disk when this returns. FileExistsError when a name is taken.
        """
        os.makedirs(folder, exist_ok=True)
        targets = {file: os.path.join(folder, os.path.basename(file)) for file in self.files}
        for file, target in targets.items():
            try:
                os.link(file, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
                _copy(file, target)
        _sync(folder)
        return targets

    def make_durable(self) -> None:
        """Have the files survive a crash, where they were sealed without that. On any thread, before they are linked.
        Raises what syncing met."""
        for generation in self._generations:
            generation.make_durable()

    def needed(self, generations: Sequence[Generation]) -> list[Generation]:
        """Those of ``generations`` that hold some of it."""
        return [g for g in generations if not set(g.files).isdisjoint(self.files)]

    def release(self) -> None:
        """Let the files go once the update itself needs them no more."""
        self._generations.clear()


def _copy(source: str, target: str) -> None:
    """A read-only copy that is on the disk."""
    try:
        with open(source, "rb") as old, open(target, "xb") as new:
            position = 0
            while moved := os.sendfile(new.fileno(), old.fileno(), position, 1 << 30):
                position += moved
            os.fchmod(new.fileno(), 0o444)
            os.fsync(new.fileno())
    except FileExistsError:
        raise
    except BaseException:
        Path(target).unlink(missing_ok=True)
        raise


def _sync(folder: str | os.PathLike[str]) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
