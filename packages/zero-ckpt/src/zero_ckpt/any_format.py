"""Open or restore the newest whole checkpoint of a root, be it this package's or DeepSpeed's.

A root is a directory of checkpoints, each in a folder that is named by its tag. A checkpoint is whole if nothing in it
is missing or damaged, as far as opening it examines that.

[Note: one rank chooses]
The first rank reads `latest` and lists the root, and all ranks open what it names: another rank might read `latest`
before or after a save replaces it. Each then tells what it found, as folders of one name may differ between nodes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .catalog import find_candidates
from .commit import holds_checkpoint
from .conversion.archive import verify_archive
from .conversion.deepspeed_folder import deepspeed_tags, files_of, is_foreign, step_of
from .coordination import run_on_all_ranks
from .errors import CheckpointError, DamagedError, ReplacedError
from .foreign import ForeignCheckpoint, warn_of_missing_states
from .latest import is_tag, read_latest
from .opened import open_regular, read_bounded
from .opening import damage_advice, find_directory, first_choice, open_checkpoint
from .reader import Checkpoint, OpenReport
from .restoring import restore
from .types import Coordinator, SoloCoordinator

logger = logging.getLogger("zero_ckpt")

T = TypeVar("T")
LATEST_UNIVERSAL = "latest_universal"
"""The file in a root of DeepSpeed that names its newest universal checkpoint."""
_MOST_TAG_BYTES = 4096
_REPLACEMENTS = 20


def open_any(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
    skip: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, or one of DeepSpeed if `tag`, `latest` or `root` itself is such a
    directory; without a file `latest` also the one that `latest_universal` names. Collective when given a coordinator.

    Of DeepSpeed's, each rank verifies the checksums of its share of the files, so that all are read once more. Without
    a tag, where `latest` is not there, cannot be followed, or names one that is damaged, the newest whole checkpoint of
    either format is opened; the `report` says what was passed over. One that a save replaces meanwhile is opened again,
    up to 20 times. Raises as
    `open_checkpoint` does; DamagedError for a file of DeepSpeed that is missing or damaged, and CheckpointError for
    objects that are not read, model-parallel checkpoints, symbolic links in one of DeepSpeed's, and ranks that see
    different contents.
    """
    group, directory = coordinator or SoloCoordinator(), Path(root)
    what = f"opening {directory}" + (f" at {tag!r}" if tag is not None else "")
    skipped = dict(skip or {})
    own_failed: CheckpointError | None = None
    replaced = 0
    while True:

        def choose(no_own: bool = own_failed is not None) -> list[Any] | None:
            """Return the result of `_choose_next` on the first rank, None on the others. `no_own`: leave this package's
            checkpoints out."""
            return _choose_next(directory, tag, skipped, no_own=no_own) if group.rank == 0 else None

        chosen = run_on_all_ranks(group, what, choose)[0]
        if chosen is None:
            lines = "".join(f"\n  {name!r}: {problem}" for name, problem in skipped.items())
            if own_failed is not None and not skipped:
                raise own_failed
            own = "" if own_failed is None else f"\n{own_failed}"
            raise DamagedError(f"{what}: no whole checkpoint{lines}{own}\n{damage_advice(directory, skipped)}")
        theirs, name, passed_over, searching = chosen
        for other, problem in passed_over:
            logger.warning("checkpoint %r is passed over: %s", other, problem)
            skipped[other] = problem
        only_choice = tag is not None or (theirs and name is None)
        try:
            if theirs:
                return _open_deepspeed(directory, name, OpenReport(tag, name or directory.name), skipped, group, what)
            opened = open_checkpoint(directory, name, coordinator=group, skip=skipped)
        except ReplacedError:
            replaced += 1
            if replaced > _REPLACEMENTS:
                raise
            continue
        except CheckpointError as error:
            if only_choice or not (searching or isinstance(error, DamagedError)):
                raise
            if theirs or name is not None:
                logger.warning("checkpoint %r cannot be opened: %s", name, error)
                skipped[name or directory.name] = str(error)
            else:
                own_failed = error
            continue
        if name != tag:
            opened.report = replace(opened.report, requested=tag, skipped=tuple(skipped.items()))
        return opened


def restore_any(
    root: str | os.PathLike[str],
    fill: Callable[[Checkpoint], T],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
    opened: Checkpoint | None = None,
) -> tuple[Checkpoint, T]:
    """Open a checkpoint as `open_any` does, call `fill` with it, and return the checkpoint and what `fill` returned;
    collective when given a coordinator.

    Where `fill` meets damage, the next older whole checkpoint is opened, as in `restore`. `opened`: a checkpoint that
    `open_any` has just returned, to begin with; None opens one. Raises as `open_any` and `restore` do.
    """
    return restore(root, fill, tag, coordinator=coordinator, opener=open_any, opened=opened)


def holds_any(root: str | os.PathLike[str]) -> bool:
    """Return whether `root` is or holds a checkpoint of either format, whole or not: if so, `open_any` opens one or
    raises DamagedError."""
    directory = Path(root)
    if holds_checkpoint(directory) or is_foreign(directory):
        return True
    return any(deepspeed_tags(directory)) or (directory.is_dir() and bool(find_candidates(directory)))


def _open_deepspeed(
    root: Path,
    name: str | None,
    report: OpenReport,
    skipped: Mapping[str, str],
    group: Coordinator,
    what: str,
) -> ForeignCheckpoint:
    """Open DeepSpeed's directory `name` of a root (None: the root itself) and verify this rank's share of its files;
    collective.

    `report` says which checkpoint was asked for, `skipped` maps the tags passed over to their problems, and `what`
    begins errors. Raises CheckpointError when the ranks find different contents, and ReplacedError when a save replaces
    the directory meanwhile.
    """
    found: list[ForeignCheckpoint] = []

    def part() -> list[int | str]:
        """Open the directory and verify this rank's share of the files; return what all ranks must find alike (see
        `ForeignCheckpoint.summary`)."""
        directory = root if name is None else find_directory(root, name)
        if directory is None:
            raise CheckpointError(f"{root} has no {name!r} here, as the first rank has; it must be shared by all ranks")
        if report.opened in skipped:
            raise DamagedError(f"{skipped[report.opened]}. Name another tag to load an older checkpoint")
        if name is not None and directory.is_symlink():
            raise CheckpointError(f"{directory} is a symbolic link, which is not followed; name the folder itself")
        found.append(ForeignCheckpoint(directory, replace(report, skipped=tuple(skipped.items()))))
        with found[0].unreplaced():
            files = files_of(directory)
            for number, file in enumerate(files):
                if number % group.world_size == group.rank:
                    verify_archive(file)
        return [*found[0].summary(), len(files)]

    def still_there() -> None:
        """Raise ReplacedError when a save has replaced the directory since this rank opened it: other ranks may have
        opened the new one."""
        with found[0].unreplaced():
            pass

    seen = run_on_all_ranks(group, what, part)
    run_on_all_ranks(group, what, still_there)
    if any(view != seen[0] for view in seen):
        views = ", ".join(f"rank {rank}: step {v[0]} of {v[1]} ranks, {v[3]} files" for rank, v in enumerate(seen))
        raise CheckpointError(
            f"{what}: the ranks see different contents of {found[0].path} ({views}); it must be shared by all ranks"
        )
    if group.rank == 0:
        warn_of_missing_states(found[0])
    return found[0]


def _choose_next(root: Path, tag: str | None, skipped: Mapping[str, str], *, no_own: bool) -> list[Any] | None:
    """Return a list that describes the checkpoint to open next, or None when all of the root are in `skipped`, a map
    from tags to their problems.

    The list is [whether it is DeepSpeed's, its name, those passed over, whether it is another one than `latest` names].
    The name is None for the root itself if that is DeepSpeed's, and for whatever `open_checkpoint` finds without a tag.
    Those passed over are pairs [tag, problem]: the one that `latest` names, if another is preferred to it. `no_own`:
    this package's checkpoints are not considered.
    """
    if tag is not None:
        return [is_tag(tag) and _is_deepspeed(root, tag), tag, [], False]
    if not no_own and holds_checkpoint(root):
        return [False, None, [], False]
    if is_foreign(root):
        return [True, None, [], False]
    latest = _latest_tag(root)
    if latest is not None and latest not in skipped and is_tag(latest) and _is_deepspeed(root, latest):
        return [True, latest, [], False]
    theirs = [name for name in deepspeed_tags(root) if name not in skipped]
    if skipped and not theirs and not find_candidates(root):
        return None
    named = [] if no_own else first_choice(root, skipped)
    if not no_own and (not theirs or any(one.manifest is not None for one in named)):
        return [False, None, [], False]
    options: list[tuple[int, bool, str]] = [(step_of(root / name), True, name) for name in theirs]
    if not no_own:
        own = (one for one in find_candidates(root) if one.manifest is not None and one.tag not in skipped)
        options += [(one.manifest.step, False, one.tag) for one in own if one.manifest is not None]
    _, is_theirs, name = max(options, default=(0, False, ""))
    passed_over = [[one.tag, one.problem] for one in named if one.tag not in skipped]
    return [is_theirs, name, passed_over, True] if name else None


def _is_deepspeed(root: Path, name: str) -> bool:
    """Return whether the tag `name` of a root is a checkpoint of DeepSpeed, also one that a save has moved aside to
    replace it."""
    directory = find_directory(root, name)
    return directory is not None and is_foreign(directory)


def _latest_tag(root: Path) -> str | None:
    """Return the tag in `latest`, else in `latest_universal`; None if there is neither file, or if `latest` is damaged,
    which `open_checkpoint` reports."""
    try:
        named = read_latest(root)
        if named is not None:
            return named
        fd = open_regular(root / LATEST_UNIVERSAL)
    except (DamagedError, OSError):
        return None
    try:
        return read_bounded(fd, _MOST_TAG_BYTES, str(root / LATEST_UNIVERSAL)).decode(errors="replace").strip()
    finally:
        os.close(fd)
