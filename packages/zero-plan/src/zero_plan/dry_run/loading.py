"""The dry run of loading a checkpoint: the engine's own load, of a checkpoint whose savers run dry too.

A part is what one rank saves of a checkpoint (`SavedPart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from zero_ckpt.dry_run import dry_run_checkpoints
from zero_ckpt.dry_run_reads import merge_manifests
from zero_ckpt.manifest import Manifest, TensorEntry
from zero_core.engine import Engine
from zero_partition import Fragment

from ..errors import PlanError
from ..planned import LoadedPlan, RankPlan
from .parts import SavedPart
from .rank import DryRun, new_engine, plan_rank
from .recorder import DryRunRecorder


def plan_ranks(
    run: DryRun, ranks: Iterable[int], world_size: int, *, checkpoint: bool, saved_by: int
) -> list[RankPlan]:
    """Return the plan of each of ``ranks``, in their order.

    ``checkpoint``: plan a save too, and a load of a checkpoint that ``saved_by`` ranks saved. Raises `PlanError` for a
    run that cannot be planned.
    """
    found = {rank: plan_rank(run, rank, world_size, checkpoint=checkpoint) for rank in ranks}
    if not checkpoint:
        return [plan for plan, _ in found.values()]
    own = {rank: part for rank, (_, part) in found.items() if part is not None}
    saved = SavedRun(saved_by, own if saved_by == world_size else {}, lambda rank: _saved_part(run, rank, saved_by))
    loaded = {}
    for rank, part in own.items():
        recorder = DryRunRecorder()
        manifest = saved.manifest(part)
        with new_engine(run, rank, world_size, recorder) as (engine, folder):
            loaded[rank] = plan_load(engine, recorder, folder, manifest, saved_by)
    return [replace(plan, loaded=loaded[rank]) for rank, (plan, _) in found.items()]


def _saved_part(run: DryRun, rank: int, world_size: int) -> SavedPart:
    """Return what rank ``rank`` of ``world_size`` saves after one step of ``run``. Raises the errors of `plan_rank`."""
    _, part = plan_rank(run, rank, world_size, steps=1, checkpoint=True)
    if part is None:
        raise PlanError(f"rank {rank} of {world_size} saved no checkpoint")
    return part


class SavedRun:
    """The checkpoint that a run of ``world_size`` ranks saves, of which only the needed parts are made.

    ``parts``: the parts that are known already, by rank. ``save``: returns the part of another rank, by running its
    save; called for those ranks that write slices which a load reads.
    """

    def __init__(self, world_size: int, parts: dict[int, SavedPart], save: Callable[[int], SavedPart]) -> None:
        self.world_size = world_size
        self._save = save
        self._parts = dict(parts)

    def manifest(self, loader: SavedPart) -> Manifest:
        """Return a manifest of the checkpoint with all slices that the rank of ``loader`` reads, and the names of all
        parameters. ``loader``: the part that this rank itself would save.
        """
        first = self._part_of(0)
        merged = merge_manifests([self._part_of(rank).manifest for rank in sorted(writers(first, loader))])
        known = {tensor.name for tensor in merged.tensors if tensor.kind == "param"}
        entries = [entry for unit in first.layout.units for entry in unit.entries if entry.name not in known]
        unread = [TensorEntry(entry.name, "param", tuple(entry.shape), "F32", ()) for entry in entries]
        return replace(merged, tensors=(*merged.tensors, *unread))

    def _part_of(self, rank: int) -> SavedPart:
        """Return the part of ``rank``; the first call for a rank that is not known runs its save."""
        if rank not in self._parts:
            self._parts[rank] = self._save(rank)
        return self._parts[rank]


def writers(saved: SavedPart, loader: SavedPart) -> set[int]:
    """Return the ranks of a save that write what one rank loads.

    ``saved``: the part of any rank of the save. ``loader``: the part that the loading rank itself would save. They are
    rank 0, which writes what is replicated; those that have elements which the loader holds; those that have the first
    elements of the same parameters, and so write their states that are not per element; and, if there are as many
    shards, the rank of the same shard, which has state of its own.
    """
    wanted: dict[str, list[Fragment]] = {}
    for unit in loader.layout.units:
        for shard in loader.owned:
            for fragment in unit.fragments(shard):
                wanted.setdefault(fragment.entry.name, []).append(fragment)
    found = {0, loader.shard} if loader.shards == saved.shards else {0}
    for unit in saved.layout.units:
        for rank in range(saved.shards):
            for fragment in unit.fragments(rank):
                own = wanted.get(fragment.entry.name, ())
                if own and (fragment.param_offset == 0 or any(_overlap(fragment, part) for part in own)):
                    found.add(rank)
    return found


def _overlap(one: Fragment, other: Fragment) -> bool:
    """Return whether two fragments, which belong to the same parameter, share elements."""
    end = min(one.param_offset + one.length, other.param_offset + other.length)
    return max(one.param_offset, other.param_offset) < end


def plan_load(engine: Engine, recorder: DryRunRecorder, folder: Path, manifest: Manifest, saved_by: int) -> LoadedPlan:
    """Load a checkpoint into ``engine``, a new one that ``recorder`` follows; return what the load needs.

    ``folder``: stands for the checkpoint's folder; nothing is read from it. ``manifest``: of the checkpoint, which
    ``saved_by`` ranks saved.
    """
    recorder.watch.reset_peaks("load")
    _, before = recorder.ends.bytes_moved()
    with dry_run_checkpoints(manifest) as dry_run:
        engine.load_checkpoint(folder)
    peaks, (_, written) = recorder.watch.peaks(), recorder.ends.bytes_moved()
    return LoadedPlan(saved_by, peaks, dry_run.read_nbytes, written - before, dry_run.scratch_nbytes)
