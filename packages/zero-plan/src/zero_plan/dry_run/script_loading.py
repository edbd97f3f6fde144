"""Plans of a script's checkpoint: each rank that saves or loads runs the script in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..scripts import ScriptRank, run_rank
from .loading import SavedRun
from .parts import SavedPart, decode_part, encode_manifest


def plan_with_checkpoint(ranks: Sequence[ScriptRank], saved_by: int) -> list[dict[str, Any]]:
    """Return the answer of `run_rank` for each of ``ranks`` (at least one), with the plans of a save and of a load of a
    checkpoint that ``saved_by`` ranks saved. Raises the errors of `run_rank`.
    """
    with TemporaryDirectory(prefix="zero-plan-") as name:
        folder = Path(name)
        answers, parts = {}, {}
        for rank in ranks:
            answers[rank.rank], parts[rank.rank] = _run_saver(rank, folder / "part")
        same = saved_by == ranks[0].world_size
        saver = replace(ranks[0], world_size=saved_by)
        saved = SavedRun(
            saved_by, parts if same else {}, lambda n: _run_saver(replace(saver, rank=n), folder / "part")[1]
        )
        path = folder / "manifest"
        for rank in ranks:
            path.write_bytes(encode_manifest(saved.manifest(parts[rank.rank])))
            answer = run_rank(replace(rank, manifest=str(path), saved_by=saved_by))
            answers[rank.rank]["plan"]["loaded"] = answer["loaded"]
    return list(answers.values())


def _run_saver(rank: ScriptRank, path: Path) -> tuple[dict[str, Any], SavedPart]:
    """Run a script as ``rank``, which saves a checkpoint; return the answer of `run_rank`, and what the rank saved,
    which comes by way of the file ``path``. Waits as `run_rank` does and raises its errors.
    """
    answer = run_rank(replace(rank, checkpoint=True, part=str(path)))
    return answer, decode_part(path.read_bytes())
