"""Choose which checkpoint to open: the one asked for, or the newest that is whole, and say what was passed over."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .catalog import Candidate, examine, find_candidates
from .commit import check_tag, has_manifest, is_tag, read_latest, replaced_directories, replaced_tag
from .coordination import together
from .errors import DamagedError, NotFoundError
from .reader import Checkpoint, OpenReport
from .types import Coordinator, SoloCoordinator

logger = logging.getLogger("zero_ckpt")


def open_checkpoint(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
    skip: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open checkpoint `tag` of `root`, or the one that `<root>/latest` names; collective when given a coordinator.

    Without a tag, when that one is damaged or missing, the newest whole checkpoint is opened instead; this is logged as
    a warning and recorded in the checkpoint's `report`. Ranks open the same one: the first that is whole for all.
    `root` may also be a checkpoint directory itself. `skip` maps tags that are known to be damaged to the reason.

    Raises NotFoundError when there is no checkpoint at all, and DamagedError when there are some but none is whole (or
    the one asked for by tag is not).
    """
    group = coordinator or SoloCoordinator()
    directory = Path(root)
    what = f"opening {directory}" + (f" at {tag!r}" if tag is not None else "")
    skipped: dict[str, str] = {}
    for look in (_first_choice, _every_choice):
        options: list[Candidate] = []

        def part(look: _Look = look, options: list[Candidate] = options) -> list[list[str | None]]:
            options.extend(look(directory, tag, skip or {}))
            return [[option.tag, option.problem] for option in options]

        for name, problem in _merge(together(group, what, part)).items():
            if problem is None:
                return _open(next(option for option in options if option.tag == name), tag, skipped, what)
            skipped[name] = problem
    if not skipped:
        raise NotFoundError(f"{what}: there is no checkpoint")
    lines = "".join(f"\n  {name!r}: {problem}" for name, problem in skipped.items())
    raise DamagedError(f"{what}: no whole checkpoint{lines}")


def _open(chosen: Candidate, requested: str | None, skipped: dict[str, str], what: str) -> Checkpoint:
    report = OpenReport(requested, chosen.tag, tuple(skipped.items()))
    if skipped:
        logger.warning("%s", report)
    if chosen.manifest is None:
        raise DamagedError(f"{what}: {chosen.tag!r} is whole on another rank but not on this one")
    return Checkpoint(chosen.path, chosen.tag, chosen.manifest, report)


_Look = Callable[[Path, "str | None", Mapping[str, str]], "list[Candidate]"]


def _first_choice(root: Path, tag: str | None, skip: Mapping[str, str]) -> list[Candidate]:
    """The one asked for, or that `root` is, or that `latest` names; most often nothing else has to be read."""
    if tag is not None:
        return [_by_tag(root, tag)]
    if has_manifest(root):
        return [_apply_skip(examine(root.name, root), skip)]
    latest = read_latest(root)
    if latest is None:
        return []
    if latest in skip:
        return [Candidate(latest, root / latest, None, skip[latest])]
    if not is_tag(latest):
        return [Candidate(latest, root, None, "`latest` does not hold a tag")]
    for path in (root / latest, *(path for path in replaced_directories(root) if replaced_tag(path) == latest)):
        if path.is_dir():
            return [examine(latest, path)]
    return [Candidate(latest, root / latest, None, "`latest` names it, but there is no such checkpoint")]


def _every_choice(root: Path, tag: str | None, skip: Mapping[str, str]) -> list[Candidate]:
    """Every checkpoint of `root`, newest first."""
    if tag is not None or has_manifest(root):
        return []
    return [_apply_skip(candidate, skip) for candidate in find_candidates(root)]


def _by_tag(root: Path, tag: str) -> Candidate:
    path = root / check_tag(tag)
    if not path.is_dir():
        for replaced in replaced_directories(root) if root.is_dir() else []:
            if replaced_tag(replaced) == tag:
                return examine(tag, replaced)
        raise NotFoundError(f"{root} has no checkpoint {tag!r}")
    return examine(tag, path)


def _apply_skip(candidate: Candidate, skip: Mapping[str, str]) -> Candidate:
    problem = skip.get(candidate.tag)
    return candidate if problem is None else Candidate(candidate.tag, candidate.path, None, problem)


def _merge(views: list[Any]) -> dict[str, str | None]:
    """The first rank's order; a checkpoint counts as whole only where it is whole on every rank."""
    merged: dict[str, str | None] = {str(name): problem for name, problem in views[0]}
    for rank, view in enumerate(views[1:], start=1):
        seen: dict[str | None, str | None] = dict(view)
        for name, problem in merged.items():
            other = seen.get(name, "not there")
            if problem is None and other is not None:
                merged[name] = f"rank {rank}: {other}"
    return merged
