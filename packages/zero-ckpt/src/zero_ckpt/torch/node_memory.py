"""Checkpoints in the memory of the nodes themselves: what one lost rank or node takes along, its neighbour still has.

[Note: node memory]
Every node has a directory in memory (tmpfs) that outlives its processes. A save writes each rank's file there, as a
checkpoint whose nodes share no file system; then every rank's files are copied to a partner on the next node. When all
copies have arrived, the nodes remove what is older. So the directories of all nodes but one hold a complete checkpoint
at every instant after the first save.

To recover, the nodes say what they hold, choose the newest checkpoint of which every file is somewhere, and copy to
each node the files that its ranks will read. Then it is an ordinary checkpoint, at any number of ranks.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..async_saver import AsyncSaver
from ..catalog import find_candidates
from ..commit import remove_directory
from ..coordination import run_on_all_ranks
from ..durable import replace_durably
from ..errors import CheckpointError
from ..manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, decode_manifest
from ..opened import Folder
from ..types import Interval
from .coordinator import DistCoordinator
from .node_folder import warn_of_other_runs
from .transfer import Transfer, exchange

Needs = Callable[[Manifest], "Iterable[str]"]
"""A function that returns the names of a checkpoint's files that this rank will read."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that the nodes hold together: its `tag` and `step`; `files` has the bytes of each file by name,
    `holders` by name the ranks that can read the file.

    `manifest_holders` are the ranks that can read its manifest. Of each node only the first rank counts as a holder.
    """

    tag: str
    step: int
    files: dict[str, int]
    holders: dict[str, tuple[int, ...]]
    manifest_holders: tuple[int, ...]


class NodeMemory:
    """This rank's part of the checkpoints in the nodes' memory; `directory` is this node's, created with mode 0700.

    `group` moves CPU tensors and is used by nothing else while a save runs. `allow`: see `AsyncSaver`. Making one is
    collective. Raises CheckpointError on every rank when a directory belongs to somebody else, is a link, can be
    written by others, or could be replaced by them.
    """

    def __init__(
        self, directory: Path, group: dist.ProcessGroup, *, allow: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        self.directory = directory
        self._group = group
        self._coordinator = DistCoordinator(group)
        opened = run_on_all_ranks(self._coordinator, f"opening {directory}", self._open_directory)
        self._nodes: list[str] = [node for node, _ in opened]
        self._attempt: str = opened[0][1]
        self._partner = partners(self._nodes)
        self._saver = AsyncSaver(self._coordinator, then=self._copy_to_partners, allow=allow)
        if self.leads:
            warn_of_other_runs(directory)

    @property
    def node(self) -> str:
        """The name of this rank's node: ranks that see the same directory are on one."""
        return self._nodes[self._coordinator.rank]

    @property
    def leads(self) -> bool:
        """Return whether this rank is the first of its node."""
        return self._nodes.index(self.node) == self._coordinator.rank

    def save(self, intervals: Iterable[Interval], *, step: int, **options: Any) -> None:
        """Copy `intervals` and save them in the background as the checkpoint of `step`; `options` are those of
        `save_sharded`. Every rank calls it.

        Waits while the last save runs. When it returns, the tensors may change as after `AsyncSaver.save`. A save that
        failed raises its CheckpointError from a later call of `save`, `wait` or `close`.
        """
        tag = f"step{step}-{self._attempt}"
        self._saver.save(self.directory, tag, intervals, step=step, node=self.node, save_latest=False, **options)

    def copied(self) -> None:
        """Wait until tensors whose copies are made in the background may change; see `AsyncSaver.copied`."""
        self._saver.copied()

    @property
    def has_failed(self) -> bool:
        """Return whether a save failed whose exception was not raised yet."""
        return self._saver.has_failed

    def wait(self) -> None:
        """Wait until every save is complete and its files are copied to the partners. Raises the exception of a failed
        save."""
        self._saver.wait()

    def close(self) -> None:
        """Finish the saves that were started and end the threads. Raises the exception of a failed one. The checkpoints
        stay."""
        self._saver.close()

    def find(self, wanted: Callable[[Manifest], bool] = lambda manifest: True) -> Found | None:
        """Return the newest checkpoint of which every file is on some node; None when there is none. Collective.

        Only checkpoints for whose manifest `wanted` returns True count. Call `wait` first: a save in the background
        uses the same group. Raises CheckpointError when a rank fails.
        """
        views = run_on_all_ranks(
            self._coordinator, f"looking for checkpoints in {self.directory}", lambda: self._held(wanted)
        )
        steps = {tag: step for view in views for tag, (step, _, _) in view.items()}
        for tag in sorted(steps, key=lambda tag: (-steps[tag], tag)):
            files = {name: nbytes for view in views if tag in view for name, nbytes in view[tag][1].items()}
            holders = {
                name: tuple(rank for rank, view in enumerate(views) if tag in view and name in view[tag][2])
                for name in files
            }
            if all(holders.values()):
                manifests = tuple(rank for rank, view in enumerate(views) if tag in view)
                return Found(tag, steps[tag], files, holders, manifests)
        return None

    def fetch(self, found: Found, needs: Needs) -> Path:
        """Copy the manifest of `found`, and those of its files that this node's ranks need, into the node's directory
        where they are missing. Returns the checkpoint's path there.

        `found` is what `find` returned on every rank; `needs` is called with its manifest, and returns the names of the
        files that this rank will read. Collective; not while a save runs. Raises CheckpointError on every rank when any
        fails.
        """
        what = f"fetching {found.tag} into {self.directory}"
        path = self.directory / found.tag
        source = found.manifest_holders[0]
        raw = run_on_all_ranks(
            self._coordinator,
            what,
            lambda: _read_manifest(path) if self._coordinator.rank == source else b"",
        )
        missing = self._first_of_nodes(found.manifest_holders)
        run_on_all_ranks(self._coordinator, what, lambda: self._place_manifest(path, raw[source], missing))
        wanted = run_on_all_ranks(self._coordinator, what, lambda: sorted(set(needs(_decode(path)))))
        transfers = self._transfers(found, wanted)
        run_on_all_ranks(self._coordinator, what, lambda: exchange(path, transfers, self._group))
        return path

    def forget(self) -> None:
        """Remove every checkpoint of this node, on its first rank; does nothing on the others. Call it on every rank,
        after the last save; it does not communicate."""
        if self.leads:
            for candidate in find_candidates(self.directory):
                remove_directory(candidate.path)

    def _open_directory(self) -> list[str]:
        """Make this node's directory if it is missing, and check that no other user can change it. Returns [the node's
        name, a random token]; rank 0's token becomes part of the tags of this run.

        Raises CheckpointError when others can change it, or OSError.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(self.directory)
        _require_own(self.directory, status)
        for above in self.directory.resolve().parents:
            _require_unmovable(self.directory, above)
        return [f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}", os.urandom(4).hex()]

    def _copy_to_partners(self, path: Path) -> None:
        """Copy every file of the checkpoint at `path` to the partner of the rank that wrote it, then remove the
        checkpoints of other tags from this node.

        Collective; on the saver's thread. With a single node nothing is copied. If a rank fails, CheckpointError is
        raised on every rank and nothing removed.
        """
        held = run_on_all_ranks(self._coordinator, f"copying {path}", lambda: self._own_files(path))
        transfers = [
            Transfer(name, nbytes, rank, self._partner[rank])
            for rank, files in enumerate(held)
            for name, nbytes in files.items()
            if self._partner[rank] != rank
        ]
        run_on_all_ranks(self._coordinator, f"copying {path}", lambda: exchange(path, transfers, self._group))
        if self.leads:
            for candidate in find_candidates(self.directory):
                if candidate.tag != path.name:
                    remove_directory(candidate.path)

    def _own_files(self, path: Path) -> dict[str, int]:
        """Return the files that this rank wrote of the checkpoint at `path`: their sizes in bytes by name. Raises as
        `_decode` does."""
        prefix = f"rank-{self._coordinator.rank:05d}"
        return {entry.path: entry.nbytes for entry in _decode(path).files if entry.path.startswith(prefix)}

    def _held(self, wanted: Callable[[Manifest], bool]) -> dict[str, Any]:
        """Return the complete checkpoints in this node's directory, by tag: [step, sizes of all its files by name,
        names of the files that are here]. Empty except on each node's first rank.

        Only checkpoints for whose manifest `wanted` returns True are listed.
        """
        if not self.leads:
            return {}
        return {
            candidate.tag: [
                candidate.manifest.step,
                {entry.path: entry.nbytes for entry in candidate.manifest.files},
                _present(candidate.path, candidate.manifest),
            ]
            for candidate in find_candidates(self.directory)
            if candidate.manifest is not None and wanted(candidate.manifest)
        }

    def _first_of_nodes(self, present: tuple[int, ...]) -> set[int]:
        """Return the first rank of each node, except of nodes that have a rank in `present`."""
        known = {self._nodes[rank] for rank in present}
        return {self._nodes.index(node) for node in self._nodes if node not in known}

    def _place_manifest(self, path: Path, raw: bytes, missing: set[int]) -> None:
        """Write the manifest `raw` into the checkpoint directory `path`, on the ranks in `missing`; does nothing on
        others."""
        if self._coordinator.rank in missing:
            path.mkdir(mode=0o700, exist_ok=True)
            Folder(path, follow=False)  # raises where a link or a file has the name
            replace_durably(path / MANIFEST_NAME, raw, 0o600)

    def _transfers(self, found: Found, wanted: list[list[str]]) -> list[Transfer]:
        """Return a transfer for each file that ranks of a node will read and that the node lacks.

        `wanted` has, by rank, the names of the files that it will read. The target is the node's first rank, the source
        is the holder with the fewest bytes to send so far. Every rank returns the same.
        """
        given = [0] * len(self._nodes)
        transfers = []
        for node in dict.fromkeys(self._nodes):
            target = self._nodes.index(node)
            names = {name for rank, own in enumerate(wanted) if self._nodes[rank] == node for name in own}
            for name in sorted(names):
                holders = found.holders[name]
                if any(self._nodes[rank] == node for rank in holders):
                    continue
                source = min(holders, key=lambda rank: (given[rank], rank))
                given[source] += found.files[name]
                transfers.append(Transfer(name, found.files[name], source, target))
        return transfers


def _decode(path: Path) -> Manifest:
    """Return the manifest of the checkpoint directory `path`. Raises DamagedError, and CheckpointError for an unknown
    version."""
    return decode_manifest(_read_manifest(path), str(path / MANIFEST_NAME))


def _read_manifest(path: Path) -> bytes:
    """Return the bytes of the manifest in the directory `path`. Raises DamagedError when it cannot be read, is a link,
    or is larger than any manifest may be."""
    return Folder(path, follow=False).read(MANIFEST_NAME, MAX_MANIFEST_BYTES)


def _present(path: Path, manifest: Manifest) -> list[str]:
    """Return the names of those files of `manifest` that are in the directory `path` with the size that it gives.

    Raises DamagedError when the directory cannot be opened, OSError for what is no regular file.
    """
    folder = Folder(path, follow=False)
    found = []
    for entry in manifest.files:
        try:
            if folder.nbytes(entry.path) == entry.nbytes:
                found.append(entry.path)
        except FileNotFoundError:
            continue
    return found


def _require_own(directory: Path, status: os.stat_result) -> None:
    """Raise CheckpointError unless `directory` belongs to this user, is a directory and no link, and nobody else can
    write into it; `status` is its `lstat`."""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CheckpointError(
            f"{directory}: expected a directory of this user that nobody else can write, got mode "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}; remove it or name another"
        )


def _require_unmovable(directory: Path, above: Path) -> None:
    """Raise CheckpointError when other users could replace `directory` by one of theirs, through its parent `above`."""
    status = os.stat(above)
    others_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or others_write:
        raise CheckpointError(
            f"{directory}: {above} belongs to user {status.st_uid} with mode {stat.filemode(status.st_mode)}, so "
            "others could put a directory of theirs in this place; name one below a directory of yours, or in /dev/shm"
        )


def partners(nodes: list[str]) -> list[int]:
    """Return, by rank, the rank that keeps a copy of its files; `nodes` has the name of each rank's node.

    If a rank is number n on its node, its partner is number n, modulo the number of ranks there, on the next node. On a
    single node every rank is its own partner.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    order = list(members)
    if len(order) == 1:
        return list(range(len(nodes)))
    found = []
    for rank, node in enumerate(nodes):
        following = members[order[(order.index(node) + 1) % len(order)]]
        found.append(following[members[node].index(rank) % len(following)])
    return found
