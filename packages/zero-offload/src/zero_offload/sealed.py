"""A store's state in files that are never written again."""

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
    """The files that hold the state of an update or a store at one moment; they are never written again.

    ``extents``: maps ``<fragment>/<kind>`` of an update, or a shard's name of a store, to its extents in order, each
    with file, offset, bytes and checksum. ``steps``: the number of updates of each fragment. ``resident``: fragments or
    shards with elements in host memory instead; read those from the update or store. ``files``: all files concerned, to
    be linked; they exist until `release`, links to them beyond it.
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
        """Return the sealed state with these ``extents``, by name; ``generations`` are those whose files hold them,
        kept until `release`. ``steps``: the number of updates of each fragment. ``resident``: names with elements in
        host memory.
        """
        return cls(
            extents=MappingProxyType({name: tuple(found) for name, found in extents.items()}),
            steps=MappingProxyType(steps),
            resident=resident,
            files=tuple(sorted({extent.path for found in extents.values() for extent in found})),
            _generations=list(generations),
        )

    def link_to(self, folder: str | os.PathLike[str]) -> dict[str, str]:
        """Hard-link every file into ``folder``; return the new path of each path in ``extents``.

        Nothing is copied if the folder is on the same file system; elsewhere the files are copied and synced.
        FileExistsError if a name is taken; links made before that stay.
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
        """Sync the files that were sealed with ``durable=False``, so that they survive a crash; do nothing for files
        that are synced. Call it, on any thread, before linking them and before `release`. Raises the errors of syncing.
        """
        for generation in self._generations:
            generation.make_durable()

    def needed(self, generations: Sequence[Generation]) -> list[Generation]:
        """Return those of ``generations`` of which a file is among ``files``; the others need not be kept any more."""
        return [g for g in generations if not set(g.files).isdisjoint(self.files)]

    def release(self) -> None:
        """Allow the store to remove the files as soon as it does not need them itself."""
        self._generations.clear()


def _copy(source: str, target: str) -> None:
    """Copy the file ``source`` to a new file ``target``, read-only and synced; FileExistsError if that exists. After
    any other error ``target`` is removed.
    """
    with open(source, "rb") as old, open(target, "xb") as new:
        try:
            position = 0
            while moved := os.sendfile(new.fileno(), old.fileno(), position, 1 << 30):
                position += moved
            os.fchmod(new.fileno(), 0o444)
            os.fsync(new.fileno())
        except BaseException:
            Path(target).unlink(missing_ok=True)
            raise


def _sync(folder: str | os.PathLike[str]) -> None:
    """Sync a folder, so that new names in it survive a crash; the content of the files is not synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
