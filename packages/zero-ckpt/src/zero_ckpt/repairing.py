"""Repair a root: undo interrupted saves, restore bytes from twins, set damaged checkpoints aside, fix `latest`.

A root is a directory of checkpoints, each in a folder that is named by its tag; its file `latest` names the newest. A
checkpoint is misnamed if its folder is not named by the tag under which it was saved, and whole if nothing in it is
missing or damaged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from .catalog import examine, find_candidates
from .commit import (
    checkpoint_directories,
    exists,
    holds_checkpoint,
    is_root,
    replaced_path,
    roots_below,
    sweep,
    tag_of,
)
from .conversion.deepspeed_folder import deepspeed_tags, names_whole_deepspeed, step_of
from .durable import fsync_directory
from .errors import CheckpointError, NotFoundError
from .latest import LATEST_NAME, is_tag, read_latest, require_replaceable, write_latest
from .locking import root_lock
from .relative import start_of
from .twins import restore_slices
from .verifying import checkpoints_in, verify_candidate

SET_ASIDE = ".damaged-"


def repair(
    root: str | os.PathLike[str], *, dry_run: bool = False, progress: Callable[[int], None] | None = None
) -> list[str]:
    """Repair what can be repaired in `root`, and return what was done, one sentence each, empty when all was well.

    Puts back a checkpoint that an interrupted save had moved aside and sweeps what interrupted saves left; renames
    checkpoints that were renamed or swapped to the tags they were saved as; rewrites a damaged slice when another
    checkpoint of the root holds one with the same checksum (its twin); renames what stays damaged to `.damaged-<tag>`;
    and points `latest` at the newest whole checkpoint, this package's or DeepSpeed's, when it names none. It changes no
    tensor of a whole checkpoint, and no directory that was not written as a checkpoint. DeepSpeed's are only read.
    With `dry_run` nothing is changed: the sentences say what would be done, beginning with "would". `progress` is
    called with the number of bytes read since its last call.

    Raises NotFoundError when `root` holds no checkpoint, with the names of the roots below it if it holds some, and
    CheckpointError when the root stays locked for ten minutes.
    """
    directory = Path(root)
    if not any(deepspeed_tags(directory)):
        require_root(directory)
    if dry_run:
        return _planned_repairs(directory, progress)
    done = [f"swept {path.name}" if not exists(path) else f"put back {path.name}" for path in sweep(directory)]
    done += _restore_names(directory)
    reports = {path: verify_candidate(path, progress=progress) for path in checkpoints_in(directory)}
    for path, report in reports.items():
        if report.ok:
            continue
        if restore_slices(path, [other for other in reports if other != path]):
            done.append(f"restored damaged slices of {path.name} from other checkpoints")
        done += _set_aside(directory, path)
    return done + _fix_latest(directory)


def require_root(directory: Path) -> None:
    """Raise NotFoundError unless `directory` holds a checkpoint, whole or not, or remains of a save; names the roots
    below it if there are some.

    A checkpoint's own directory is no root.
    """
    if not directory.is_dir():
        raise NotFoundError(f"{directory} is not a directory{start_of(directory)}")
    if holds_checkpoint(directory):
        raise NotFoundError(f"{directory} is a checkpoint itself; name the root that it is in: {directory.parent}")
    if is_root(directory):
        return
    below = roots_below(directory)
    if below:
        raise NotFoundError(
            f"{directory} holds no checkpoint, but its folders {', '.join(below)} do; name one of them as the root"
        )
    raise NotFoundError(f"{directory} holds no checkpoint")


def _planned_repairs(root: Path, progress: Callable[[int], None] | None) -> list[str]:
    """Return what `repair` would do, one sentence each, without changing anything.

    `progress` is called with the number of bytes read since its last call.
    """
    done = [f"would sweep or put back {path.name}" for path in sweep(root, dry_run=True)]
    names = _misnamed(root)
    done += [f"would rename {path.name} to {tag}, as which it was saved" for path, tag in names.items()]
    whole = set()
    for path in checkpoints_in(root):
        report = verify_candidate(path, in_root=path not in names, progress=progress)
        if report.ok:
            whole.add(names.get(path, path.name))
        else:
            done.append(f"would restore {path.name} from other checkpoints, or set it aside: {report.problems[0]}")
    if not _names_whole(root, whole) and (whole or _whole_of_deepspeed(root)):
        done.append("would point latest at the newest whole checkpoint")
    return done


def _misnamed(root: Path) -> dict[Path, str]:
    """Return the directories of misnamed whole checkpoints, each with the tag that it was saved under."""
    found = {}
    for path in checkpoint_directories(root):
        manifest = examine(path.name, path, in_root=False).manifest
        if manifest is not None and manifest.tag not in (None, path.name) and is_tag(manifest.tag or ""):
            found[path] = manifest.tag or ""
    return found


def _restore_names(root: Path) -> list[str]:
    """Rename misnamed checkpoints to their tags, under the root's lock. Returns what was done, one sentence each.

    A checkpoint whose tag is taken keeps its name, and the sentence says so.
    """
    done = []
    with root_lock(root):
        aside = {path: replaced_path(root, tag) for path, tag in _misnamed(root).items()}
        for path, place in aside.items():
            path.rename(place)
        for path, place in aside.items():
            tag = tag_of(place)
            target = path if exists(root / tag) else root / tag
            place.rename(target)
            if target is path:
                done.append(f"left {path.name}, a copy of {tag}, which is there as well; move it out of the root")
            else:
                done.append(f"renamed {path.name} to {tag}, as which it was saved")
        fsync_directory(root)
    return done


def _set_aside(root: Path, path: Path) -> list[str]:
    """Rename the damaged checkpoint at `path` to `.damaged-<tag>`, under the root's lock. Returns a list of one
    sentence that says so; an empty list, with nothing done, if the checkpoint is whole by now.

    That happens if a file that it shares with another checkpoint was restored there, or a save has replaced it. A
    number is added to a name that is taken.
    """
    before = _identity(path)
    report = verify_candidate(path)
    if report.ok or verify_candidate(path, in_root=False).ok:  # whole under another name is no damage
        return []
    with root_lock(root):
        if before is None or _identity(path) != before:  # a save has replaced it meanwhile
            return []
        target, number = root / f"{SET_ASIDE}{path.name}", 2
        while exists(target):
            target, number = root / f"{SET_ASIDE}{path.name}.{number}", number + 1
        path.rename(target)
        fsync_directory(root)
    return [f"set {path.name} aside as {target.name}: {report.problems[0]}"]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of `path`, which tell whether it is still the same directory; None if there is nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _readable_latest(root: Path) -> str | None:
    """Return the tag that `latest` names; None if it is absent or damaged."""
    try:
        return read_latest(root)
    except CheckpointError:
        return None


def _names_whole(root: Path, whole: Collection[str]) -> bool:
    """Return whether `latest` names one of the tags in `whole`, or a checkpoint of DeepSpeed in which nothing is
    missing or damaged; that one is read in full."""
    named = _readable_latest(root)
    return named in whole or names_whole_deepspeed(root, named, checksums=True)


def _whole_of_deepspeed(root: Path) -> tuple[int, str] | None:
    """Return (step, tag) of the newest checkpoint of DeepSpeed in which nothing is missing or damaged; None if there is
    none. It is read in full, as are all that are newer."""
    steps = sorted(((step_of(root / tag), tag) for tag in deepspeed_tags(root)), reverse=True)
    whole = (found for found in steps if found[0] >= 0 and names_whole_deepspeed(root, found[1], checksums=True))
    return next(whole, None)


def _fix_latest(root: Path) -> list[str]:
    """Point `latest` at the newest whole checkpoint unless it names a whole one. Returns a list of one sentence that
    says what was done, or an empty list.

    Does nothing without a whole checkpoint. Where `latest` is a directory, it is left and the sentence says so.
    """
    own = [candidate for candidate in find_candidates(root) if candidate.problem is None]
    if _names_whole(root, [candidate.tag for candidate in own]):
        return []
    steps = [(candidate.manifest.step, candidate.tag) for candidate in own[:1] if candidate.manifest is not None]
    theirs = _whole_of_deepspeed(root)
    if theirs is not None and (not steps or theirs[0] > steps[0][0]):
        steps = [theirs]
    if not steps:
        return []
    try:
        require_replaceable(root)
    except CheckpointError as error:
        return [f"left {LATEST_NAME}: {error}"]
    write_latest(root, steps[0][1])
    return [f"pointed latest at {steps[0][1]}"]
