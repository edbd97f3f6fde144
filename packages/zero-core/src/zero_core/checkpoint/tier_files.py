"""Seal the files of a rank's tiers (they are never written again), so that a checkpoint can link to them instead of
copying."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zero_offload import DelayedUpdate, NvmeStore, OffloadedUpdate, Sealed
from zero_offload.swap_paths import need_disk

from ..offloading import Offloading
from ..state import TrainingState


class TierFiles:
    """The files of this rank's optimizer states and parameter shards, for a checkpoint below ``root`` to link to.
    ``tiers``: write the files. ``durable``: sealing syncs the files to the drive, else `make_durable` does. Call order:
    `flush_weights` while the checkpoint's intervals are listed, so that its errors reach every rank; `seal_weights` and
    `seal_states` then or later, on any thread, before weights and states are written; `make_durable` on any thread."""

    def __init__(self, state: TrainingState, tiers: Offloading, root: Path, *, durable: bool = True) -> None:
        self._tiers, self._root, self._durable = tiers, root, durable
        self._zero = state.config.zero_optimization
        units = state.partition.units
        self._trained = sum(u.layout.shard_numel * u.plan.dtype.itemsize for u in units if u.states is not None)
        self._sealed: list[Sealed] = []

    def flush_weights(self) -> frozenset[str]:
        """Wait for writes of parameter shards. Return the names of the units whose shards are in files that can be
        linked."""
        store = self._store()
        if store is None:
            return frozenset()
        store.flush()
        return store.filed

    def seal_weights(self) -> Sealed | None:
        """Seal and return the files of parameter shards; None if the checkpoint cannot link to them. Raises
        `BudgetError` if the drive has no room for the files that are then written instead."""
        store = self._store()
        if store is None:
            return None
        self._check_room()
        return self._remembered(store.seal(durable=self._durable, flush=False))

    def seal_states(self) -> Sealed | None:
        """Make the files of optimizer states read-only and return them; None if a checkpoint cannot link to them. Later
        steps write new files: raises `BudgetError` if the drive has no room for those."""
        update = self._update()
        if update is None:
            return None
        self._check_room()
        return self._remembered(update.seal(durable=self._durable))

    def make_durable(self) -> None:
        """Sync all sealed files to the drive, so that they survive a crash. Raises OSError."""
        for sealed in self._sealed:
            sealed.make_durable()

    def _remembered(self, sealed: Sealed | None) -> Sealed | None:
        """Keep ``sealed`` for `make_durable`, unless it is None, and return it."""
        self._sealed += [sealed] if sealed is not None else []
        return sealed

    def _update(self) -> OffloadedUpdate | DelayedUpdate | None:
        """Return the optimizer's tier if its files are on the file system of ``root``, for links; else None."""
        update, paths = self._tiers.update, self._zero.offload_optimizer.nvme_path or ()
        if update is None or not update.plan["nvme"]:
            return None
        return update if _share_drive(self._root, paths) else None

    def _store(self) -> NvmeStore | None:
        """Return the store of parameter shards if its files are on the file system of ``root``, for links; else
        None."""
        store, paths = self._tiers.store, self._zero.offload_param.nvme_path or ()
        return store if isinstance(store, NvmeStore) and _share_drive(self._root, paths) else None

    def _check_room(self) -> None:
        """Raise `BudgetError` if the disk has no room for a second copy of all states and trained weights."""
        budget = self._tiers.new_budget()
        update, store = self._update(), self._store()
        if update is not None:
            paths = self._zero.offload_optimizer.paths
            need_disk(budget, "masters and states after this checkpoint", update.memory()["nvme"], paths)
        if store is not None:
            nbytes, paths = self._trained + store.carried_bytes(), self._zero.offload_param.paths
            need_disk(budget, "parameter shards after this checkpoint", nbytes, paths)
        budget.check()


def _share_drive(folder: Path, paths: Sequence[str]) -> bool:
    """Create ``folder`` if it is missing; return whether it is on the same file system as all of ``paths``."""
    folder.mkdir(parents=True, exist_ok=True)
    return all(os.stat(folder).st_dev == os.stat(path).st_dev for path in paths)
