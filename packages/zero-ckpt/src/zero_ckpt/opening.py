"""Choose the checkpoint to open: the requested one, or the newest whole one, with a report of those passed over.

A root is a directory in which checkpoints are saved, each in a folder that is named by its tag. A candidate is a
checkpoint directory that was examined: it is whole, or has a problem, text that says what is wrong. `skip` maps tags
that are known to be damaged to their problems. To look is to examine candidates once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from .catalog import Candidate, examine, find_candidates
from .commit import exists, holds_checkpoint, list_tags, replaced_directories, replaced_tag, roots_below
from .coordination import run_on_all_ranks
from .errors import DamagedError, NotFoundError, ReplacedError
from .latest import LATEST_NAME, check_tag, is_tag, read_latest
from .reader import Checkpoint, OpenReport
from .relative import start_of
from .types import Coordinator, SoloCoordinator

_LOOKS = 50
_BETWEEN_LOOKS_SECONDS = 0.01

logger = logging.getLogger("zero_ckpt")


def open_checkpoint(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
    skip: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open checkpoint `tag` of `root`, or the one that `<root>/latest` names; collective when given a coordinator.

    A root is a directory in which checkpoints are saved. A checkpoint is whole when its manifest is valid and its files
    have their sizes; their bytes are not read here. Without a tag, when the one of `latest` is damaged or missing, the
    newest whole checkpoint is opened instead; this is logged as a warning and recorded in the checkpoint's `report`.
    All ranks open the same one, the first that is whole on every rank. `root` may also be a checkpoint directory
    itself. `skip` maps tags that are known to be damaged to the reason.

    Raises NotFoundError when there is no checkpoint at all, DamagedError when there are some but none is whole (or the
    one requested by tag is not), and CheckpointError on every rank when one cannot read the root. If a save is
    replacing a checkpoint, waits half a second for it.
    """
    group = coordinator or SoloCoordinator()
    directory = Path(root)
    what = f"opening {directory}" + (f" at {tag!r}" if tag is not None else "")
    skipped: dict[str, str] = {}
    for look in (_first_choice, _every_choice):
        options: list[Candidate] = []

        def part(look: _Look = look, options: list[Candidate] = options) -> list[list[str | None]]:
            """Add the candidates that `look` finds on this rank to `options`, and return [tag, problem or None] of
            each, for the other ranks."""
            options.extend(_look_until_settled(look, directory, tag, skip or {}))
            return [[option.tag, option.problem] for option in options]

        for name, problem in _merge_problems(run_on_all_ranks(group, what, part)).items():
            if problem is None:
                return _open_chosen(next(option for option in options if option.tag == name), tag, skipped, what)
            skipped[name] = problem
    if not skipped:
        raise NotFoundError(f"{what}: there is no checkpoint{whereabouts(directory)}")
    lines = "".join(f"\n  {name!r}: {problem}" for name, problem in skipped.items())
    raise DamagedError(f"{what}: no whole checkpoint{lines}\n{damage_advice(directory, skipped)}")


def damage_advice(directory: Path, damaged: Collection[str]) -> str:
    """Return the last line of an error about the damaged tags of a root: advice on what to do."""
    others = [name for name in list_tags(directory) if name not in damaged]
    instead = f", or open another tag: {', '.join(others)}" if others else ""
    return f"`zero-ckpt verify {directory}` lists what is damaged; try `zero-ckpt repair`{instead}"


def whereabouts(directory: Path) -> str:
    """Return the end of an error about `directory`, a root in which no checkpoint was found: what is there instead."""
    if not directory.exists():
        return f": {directory} does not exist{start_of(directory)}"
    if not directory.is_dir():
        return f": {directory} is a file; for safetensors and others see `zero-ckpt convert`"
    if roots := roots_below(directory):
        return f", but its folders {', '.join(roots)} hold some; name one of them as the root"
    names = sorted(os.listdir(directory))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f": {directory} holds {', '.join(names[:3])}{more}" if names else f": {directory} is an empty folder"


def _open_chosen(chosen: Candidate, requested: str | None, skipped: dict[str, str], what: str) -> Checkpoint:
    """Return the candidate `chosen` as an open checkpoint, and log a warning if others were passed over for it.

    `requested` is the tag that the caller asked for, None for the newest; `skipped` maps the tags passed over to their
    problems; `what` begins errors. Raises DamagedError when the candidate is not whole on this rank, and ReplacedError
    when it has changed since it was examined.
    """
    report = OpenReport(requested, chosen.tag, tuple(skipped.items()))
    if skipped:
        logger.warning("%s", report)
    if chosen.manifest is None:
        raise DamagedError(f"{what}: {chosen.tag!r} is whole on another rank but not on this one")
    if chosen.folder is None:  # one of many that were looked at; none of those is held open
        chosen = examine(chosen.tag, chosen.path)
    if chosen.manifest is None or chosen.folder is None:
        raise ReplacedError(f"{what}: {chosen.problem}")
    return Checkpoint(chosen.path, chosen.tag, chosen.manifest, report, chosen.folder)


_Look = Callable[[Path, "str | None", Mapping[str, str]], "list[Candidate]"]


def _look_until_settled(look: _Look, root: Path, tag: str | None, skip: Mapping[str, str]) -> list[Candidate]:
    """Return the candidates that `look` finds when called with the other arguments. While a save is moving one of them,
    `look` is called again, 50 times at most and 10 ms apart."""
    for _ in range(_LOOKS):
        found = look(root, tag, skip)
        if not any(candidate.moved for candidate in found):
            break
        time.sleep(_BETWEEN_LOOKS_SECONDS)
    return found


def first_choice(root: Path, skip: Mapping[str, str]) -> list[Candidate]:
    """Return, in a list, the candidate that `open_checkpoint` prefers without a tag: `root` itself if that is a
    checkpoint, else the one that `latest` names, whole or not. The list is empty if there is no `latest`."""
    return _look_until_settled(_first_choice, root, None, skip)


def _first_choice(root: Path, tag: str | None, skip: Mapping[str, str]) -> list[Candidate]:
    """Return, in a list, the candidate of `tag`; without a tag that of `root` itself, if it is a checkpoint, or of
    `latest`. The list is empty if there is no `latest`.

    A tag in `skip`, or a `latest` that cannot be followed, gives a candidate with that problem. Raises NotFoundError
    when there is no checkpoint `tag`.
    """
    if tag is not None:
        path = find_directory(root, check_tag(tag))
        if path is None:
            raise NotFoundError(f"{root} has no checkpoint {tag!r}; its tags: {', '.join(list_tags(root)) or 'none'}")
        return [examine(tag, path)]
    if holds_checkpoint(root):
        return [_apply_skip(examine(root.name, root, in_root=False), skip)]
    try:
        latest = read_latest(root)
    except DamagedError as error:
        return [Candidate(LATEST_NAME, root, None, str(error))]
    if latest is None:
        return []
    if latest in skip:
        return [Candidate(latest, root / latest, None, skip[latest])]
    if not is_tag(latest):
        return [Candidate(latest, root, None, "`latest` does not hold a tag")]
    path = find_directory(root, latest)
    if path is None:
        return [Candidate(latest, root / latest, None, "`latest` names it, but there is no such checkpoint")]
    return [examine(latest, path)]


def find_directory(root: Path, tag: str) -> Path | None:
    """Return the directory of checkpoint `tag`, or the one to which a save has moved it aside while replacing it; None
    if there is neither."""
    for _ in range(3):
        if exists(root / tag):
            return root / tag
        for path in replaced_directories(root) if root.is_dir() else []:
            if replaced_tag(path) == tag:
                return path
    return None


def _every_choice(root: Path, tag: str | None, skip: Mapping[str, str]) -> list[Candidate]:
    """Return every checkpoint of `root` as a candidate, newest first; one in `skip` has the problem given there. The
    list is empty when `tag` or `root` itself names the only choice."""
    if tag is not None or holds_checkpoint(root):
        return []
    return [_apply_skip(candidate, skip) for candidate in find_candidates(root)]


def _apply_skip(candidate: Candidate, skip: Mapping[str, str]) -> Candidate:
    """Return the candidate; if `skip` has its tag, a candidate without manifest whose problem is the reason given
    there."""
    problem = skip.get(candidate.tag)
    return candidate if problem is None else Candidate(candidate.tag, candidate.path, None, problem)


def _merge_problems(views: list[Any]) -> dict[str, str | None]:
    """Return the problem of each of rank 0's candidates by tag, in its order; None where the candidate is whole on
    every rank.

    `views` has, by rank, a list of [tag, problem or None].
    """
    merged: dict[str, str | None] = {str(name): problem for name, problem in views[0]}
    for rank, view in enumerate(views[1:], start=1):
        seen: dict[str | None, str | None] = dict(view)
        for name, problem in merged.items():
            other = seen.get(name, "not there")
            if problem is None and other is not None:
                merged[name] = f"rank {rank}: {other}"
    return merged
