"""Save all ranks' intervals as a checkpoint of DeepSpeed.

[Note: checkpoints of DeepSpeed are made from one of ours]
DeepSpeed's files hold other elements than the ranks that save have. So the intervals are written as a checkpoint of
this package first, under a name that no reader takes for one; each rank reads from it what its files of DeepSpeed hold.
The directory of those takes the tag's name when all are on disk, `latest` follows, and the first one is removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .catalog import examine
from .commit import Staging, require_replaceable, staging_path
from .coordination import run_on_all_ranks
from .direct import make_sink
from .dry_run import current_dry_run
from .errors import CheckpointError
from .latest import write_latest
from .reader import Checkpoint, OpenReport
from .saving import SaveJob, save_sharded
from .scripts import leave_script
from .types import Coordinator, Interval, SoloCoordinator

if TYPE_CHECKING:
    from .conversion.deepspeed_sink import DeepSpeedForm

_THEIR_FILE = re.compile(
    r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)


def save_deepspeed(
    root: str | os.PathLike[str],
    tag: str,
    intervals: Iterable[Interval],
    form: Callable[[Checkpoint], DeepSpeedForm],
    *,
    coordinator: Coordinator | None = None,
    save_latest: bool = True,
    **extras: Any,
) -> Path:
    """Write the intervals of all ranks as a checkpoint of DeepSpeed in `<root>/<tag>`, one set of files per rank, and
    return that path; collective.

    `form` is called on every rank with the intervals as a checkpoint of this package, and returns what DeepSpeed's
    files hold besides tensors. `extras` are further arguments of `save_sharded`; the named ones are as there. A
    checkpoint of that tag is replaced, also one of DeepSpeed. The new one appears complete or not at all. While it is
    written the disk holds the state twice. In a dry run (see `zero_ckpt.dry_run`) the checkpoint is saved as
    `save_sharded` does. Raises CheckpointError on every rank when any rank fails.
    """
    group = coordinator or SoloCoordinator()
    if current_dry_run() is not None:
        return save_sharded(root, tag, intervals, coordinator=group, save_latest=save_latest, **extras)
    step, rank_state = extras.pop("step"), extras.pop("rank_state", None)
    job = SaveJob(Path(root), tag, group, make_sink, None, _require_replaceable)
    described_extras = {"aliases": {}, "frozen": None, "client_state": None, "config": None, **extras, "step": step}
    described = run_on_all_ranks(group, job.what, lambda: job.describe(intervals, described_extras, rank_state, None))
    job.plan(described)
    theirs: Staging | None = None
    try:
        run_on_all_ranks(group, job.what, job.stage)
        written = run_on_all_ranks(group, job.what, job.write)
        token = os.urandom(6).hex()

        def seal() -> str:
            """Complete the checkpoint of this package and make the directory for DeepSpeed's files, on the first rank;
            return this rank's token, of which the first rank's is in the directory's name."""
            nonlocal theirs
            if group.rank == 0:
                job.seal(described, written, {})
                theirs = Staging.create(job.root, tag, token, _require_replaceable)
            return token

        token = run_on_all_ranks(group, job.what, seal)[0]
        run_on_all_ranks(group, job.what, lambda: _write_files(job, form, token))

        def commit() -> None:
            """Rename the directory of DeepSpeed's files to the tag and point `latest` at it, on the first rank; does
            nothing on others."""
            if theirs is not None:
                leave_script(job.root)
                theirs.commit()
                if save_latest:
                    write_latest(job.root, tag)

        run_on_all_ranks(group, job.what, commit)
    finally:
        if theirs is not None:
            theirs.discard()
        job.discard()
    return job.root / tag


def _write_files(job: SaveJob, form: Callable[[Checkpoint], DeepSpeedForm], token: str) -> None:
    """Write this rank's files of DeepSpeed, with the tensors of the checkpoint that `job` has written, into the staged
    directory of `token`. Raises CheckpointError when that checkpoint cannot be read or DeepSpeed's files cannot hold
    its values."""
    from .conversion.deepspeed_sink import write_rank_files

    found = examine(job.tag, job.staged, in_root=False)
    if found.manifest is None or found.folder is None:
        raise CheckpointError(f"{found.problem}; {job.root} must be shared by all ranks")
    checkpoint = Checkpoint(job.staged, job.tag, found.manifest, OpenReport(job.tag, job.tag), found.folder)
    folder = staging_path(job.root, job.tag, token)
    write_rank_files(checkpoint, form(checkpoint), folder, job.rank, job.ranks)


def _require_replaceable(target: Path) -> None:
    """Raise CheckpointError unless `target` does not exist, or is an empty directory, a checkpoint of this package, or
    a directory that holds nothing but files of DeepSpeed."""
    if target.is_dir() and not target.is_symlink():
        names = os.listdir(target)
        if names and all(_THEIR_FILE.fullmatch(name) for name in names):
            return
    require_replaceable(target)
