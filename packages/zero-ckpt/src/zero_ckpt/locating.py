"""Resolve the names that people give checkpoints: `run/ckpt`, `run/ckpt@100` and `run/ckpt/global_step100`.

A root, here `run/ckpt`, is a directory of checkpoints, each in a folder that is named by its tag; its file `latest`
names the newest.
"""

from __future__ import annotations

from pathlib import Path

from .catalog import find_candidates
from .errors import NotFoundError
from .opening import open_checkpoint, whereabouts
from .reader import Checkpoint


def split_spec(spec: str) -> tuple[Path, str | None]:
    """Split `spec` at its last `@`; return (directory, text after the `@`). If `spec` is a path that exists or has no
    `@`, all of it is the directory and the text is None."""
    path = Path(spec)
    directory, at, which = spec.rpartition("@")
    if path.exists() or not at:
        return path, None
    return Path(directory), which


def open_spec(spec: str) -> Checkpoint:
    """Open the checkpoint that `spec` names: `ROOT@TAG`, `ROOT@STEP`, `ROOT`, or the directory of a checkpoint.

    `ROOT` alone means the checkpoint that its `latest` names, or the newest whole one if that is damaged, as in
    `open_checkpoint`. Raises NotFoundError or DamagedError.
    """
    root, which = split_spec(spec)
    return open_checkpoint(root, None if which is None else find_tag(root, which))


def find_tag(root: Path, which: str) -> str:
    """Return the tag of `root` that equals `which`, or the tag of the only checkpoint whose step is `which`.

    Raises NotFoundError, which lists the tags, when there is none, or several have that step; for a root without
    checkpoints it says what is there.
    """
    candidates = find_candidates(root)
    if any(candidate.tag == which for candidate in candidates):
        return which
    found = [item.tag for item in candidates if item.manifest is not None and str(item.manifest.step) == which]
    if len(found) == 1:
        return found[0]
    if not candidates:
        raise NotFoundError(f"{root}: there is no checkpoint{whereabouts(root)}")
    known = ", ".join(candidate.tag for candidate in candidates)
    problem = "no checkpoint" if not found else f"{len(found)} checkpoints"
    raise NotFoundError(f"{root} has {problem} with tag or step {which!r}; its tags: {known}")
