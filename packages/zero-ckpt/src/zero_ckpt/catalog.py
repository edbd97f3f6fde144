"""Which checkpoints a directory holds, newest first, and what is wrong with those that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .commit import list_tags, replaced_directories, replaced_tag
from .errors import CheckpointError, DamagedError
from .manifest import MANIFEST_NAME, Manifest, decode_manifest


@dataclass(frozen=True)
class Candidate:
    """A checkpoint directory: `manifest` when it is complete, otherwise `problem` says what is wrong."""

    tag: str
    path: Path
    manifest: Manifest | None
    problem: str | None


def load_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory, after a check that every data file is there in full length.

    Raises DamagedError or CheckpointError (unknown version).
    """
    file = path / MANIFEST_NAME
    try:
        manifest = decode_manifest(file.read_bytes(), str(file))
    except OSError as error:
        raise DamagedError(f"{file}: {error.strerror or error}") from error
    for entry in manifest.files:
        try:
            nbytes = (path / entry.path).stat().st_size
        except FileNotFoundError as error:
            if manifest.per_node:
                continue
            raise DamagedError(f"{path / entry.path}: {error.strerror}") from error
        except OSError as error:
            raise DamagedError(f"{path / entry.path}: {error.strerror or error}") from error
        if nbytes != entry.nbytes:
            raise DamagedError(f"{path / entry.path}: {nbytes} bytes, expected {entry.nbytes}")
    return manifest


def examine(tag: str, path: Path) -> Candidate:
    """What one directory holds."""
    try:
        return Candidate(tag, path, load_manifest(path), None)
    except CheckpointError as error:
        return Candidate(tag, path, None, str(error))


def find_candidates(root: Path) -> list[Candidate]:
    """All checkpoints in `root`: complete ones by step, newest first, then the others by tag."""
    found = [examine(tag, root / tag) for tag in list_tags(root)]
    found += [examine(replaced_tag(path), path) for path in replaced_directories(root)]
    return sorted(
        found, key=lambda item: (item.manifest is None, -(item.manifest.step if item.manifest else 0), item.tag)
    )
