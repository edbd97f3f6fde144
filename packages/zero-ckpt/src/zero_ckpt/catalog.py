"""The checkpoints of a directory, newest first, and what is wrong with those that cannot be used.

A root is a directory of checkpoints, each in a folder that is named by its tag. A checkpoint is complete when its
manifest is valid and its data files have the sizes that the manifest gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from .commit import exists, list_tags, replaced_directories, replaced_tag
from .errors import CheckpointError, DamagedError
from .manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, decode_manifest
from .opened import Folder


@dataclass(frozen=True)
class Candidate:
    """A checkpoint directory: `manifest` when it is complete, otherwise `problem` says what is wrong.

    `folder` holds the directory open, where there is one. `moved`: a save moved the directory while it was read, so
    `problem` may be wrong; look again.
    """

    tag: str
    path: Path
    manifest: Manifest | None
    problem: str | None
    folder: Folder | None = field(default=None, repr=False, compare=False)
    moved: bool = False


def load_manifest(folder: Folder) -> Manifest:
    """Return the manifest of a checkpoint directory after checking that every data file has the size that the manifest
    gives; raises DamagedError if not.

    Where the manifest says `per_node`, files may be absent. The files' bytes are not read. Raises CheckpointError for
    an unknown version, and ReplacedError when the directory lost its name meanwhile.
    """
    raw = folder.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    manifest = decode_manifest(raw, str(folder.path / MANIFEST_NAME))
    for entry in manifest.files:
        where = folder.path / entry.path
        try:
            nbytes = folder.nbytes(entry.path)
        except FileNotFoundError as error:
            if manifest.per_node:
                continue
            raise DamagedError(f"{where}: {error.strerror}") from error
        except OSError as error:
            raise DamagedError(f"{where}: {error.strerror or error}") from error
        if nbytes != entry.nbytes:
            raise DamagedError(f"{where}: {nbytes} bytes, expected {entry.nbytes}")
    return manifest


def examine(tag: str, path: Path, *, in_root: bool = True) -> Candidate:
    """Examine the directory `path` and return it as a candidate. A complete one is held open; damage becomes the
    candidate's `problem` and does not raise.

    `in_root`: the directory lies in a root and is named `tag`, so it must not be a link, nor hold a checkpoint of
    another tag. No data file is read.
    """
    folder = None
    try:
        folder = Folder(path, follow=not in_root)
        manifest = load_manifest(folder)
        if in_root and manifest.tag not in (None, tag):
            raise DamagedError(
                f"{path} holds the checkpoint that was saved as {manifest.tag!r}: folders were renamed or swapped; "
                "`zero-ckpt repair` puts them back, and opening this path itself takes it as it is"
            )
    except (CheckpointError, OSError) as error:
        # A name that was not there when it was opened may be there again by now: a save had it between two renames.
        absent = isinstance(error.__cause__, FileNotFoundError) or not exists(path)
        moved = absent if folder is None else not folder.is_current()
        return Candidate(tag, path, None, str(error), moved=moved)
    return Candidate(tag, path, manifest, None, folder)


def find_candidates(root: Path) -> list[Candidate]:
    """Return all checkpoints in `root` as candidates: complete ones, newest step first, then the others by tag. None is
    held open.

    Raises OSError when `root` cannot be listed.
    """
    places = [(tag, root / tag) for tag in list_tags(root)]
    places += [(replaced_tag(path), path) for path in replaced_directories(root)]
    found = [replace(examine(tag, path), folder=None) for tag, path in places]
    return sorted(
        found, key=lambda item: (item.manifest is None, -(item.manifest.step if item.manifest else 0), item.tag)
    )
