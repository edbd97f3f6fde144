"""The dry run of saving a checkpoint: the engine's own save, into files without content."""

from __future__ import annotations

from pathlib import Path

from zero_ckpt.rehearsal import rehearsed
from zero_core.engine import Engine

from ..errors import PlanError
from ..planned import FileRow, SavedPlan
from .parts import SavedPart
from .peak_watch import PeakWatch

_TAG = "planned"


def rehearse_save(engine: Engine, watch: PeakWatch, folder: Path) -> tuple[SavedPlan, SavedPart]:
    """Save a checkpoint of ``engine`` below ``folder``, into files without content; return the save's needs, and what
    it saved. Resets the peaks of ``watch``.

    ``folder``: on the same file system as the tiers' files, so that the save can link them.
    """
    root = folder / "checkpoint"
    watch.reset_peaks("save")
    with rehearsed() as rehearsal:
        engine.save_checkpoint(root, _TAG)
    payload = sorted(path for path in (root / _TAG).iterdir() if path.suffix in (".safetensors", ".extents"))
    files = tuple(FileRow(path.name, path.stat().st_size) for path in payload)
    linked = tuple(path.name for path in payload if path.suffix == ".extents")
    if rehearsal.manifest is None:
        raise PlanError("the engine saved no checkpoint")
    parts = engine.partition
    part = SavedPart(rehearsal.manifest, parts.layout, parts.rank, parts.world_size, parts.owned_ranks())
    return SavedPlan(watch.peaks(), files, linked, rehearsal.message_nbytes, rehearsal.copied_nbytes), part
