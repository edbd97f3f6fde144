"""The dry run of saving a checkpoint: the engine's own save, into files without content."""

from __future__ import annotations

from pathlib import Path

from zero_ckpt.dry_run import dry_run_checkpoints
from zero_core.engine import Engine

from ..errors import PlanError
from ..planned import FileRow, SavedPlan
from .parts import SavedPart
from .peak_watch import PeakWatch

_TAG = "planned"


def plan_save(engine: Engine, watch: PeakWatch, folder: Path) -> tuple[SavedPlan, SavedPart]:
    """Save a checkpoint of ``engine`` below ``folder``, into files without content. Return (plan, part): the needs of
    the save, and what it saved. Resets the peaks of ``watch``. Raises `PlanError` if the engine saved nothing.

    ``folder``: on the same file system as the tiers' files, so that the save can link them.
    """
    root = folder / "checkpoint"
    watch.reset_peaks("save")
    with dry_run_checkpoints() as dry_run:
        engine.save_checkpoint(root, _TAG)
    payload = sorted(path for path in (root / _TAG).iterdir() if path.suffix in (".safetensors", ".extents"))
    files = tuple(FileRow(path.name, path.stat().st_size) for path in payload)
    linked = tuple(path.name for path in payload if path.suffix == ".extents")
    if dry_run.manifest is None:
        raise PlanError("the engine saved no checkpoint")
    parts = engine.partition
    part = SavedPart(dry_run.manifest, parts.layout, parts.rank, parts.world_size, parts.owned_ranks())
    return SavedPlan(watch.peaks(), files, linked, dry_run.message_nbytes, dry_run.copied_nbytes), part
