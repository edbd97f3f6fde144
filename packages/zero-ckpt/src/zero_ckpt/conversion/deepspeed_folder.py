"""Which folders are checkpoints of DeepSpeed, which of their files are read, and whether those are whole.

A root is a directory of checkpoints, each in a folder that is named by its tag, the tag directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..commit import holds_checkpoint, replaced_directories, replaced_tag
from ..errors import CheckpointError, DamagedError
from ..latest import is_tag
from .archive import verify_archive
from .sources import open_foreign


def is_foreign(directory: Path) -> bool:
    """Return whether a directory holds model files of DeepSpeed and is no checkpoint of this package."""
    return directory.is_dir() and not holds_checkpoint(directory) and any(directory.glob("*model_states.pt"))


def deepspeed_tags(root: Path) -> Iterator[str]:
    """Yield the tags of DeepSpeed's checkpoints in a root, also of those that a save has moved aside."""
    if root.is_dir():
        tags = (path for path in root.iterdir() if is_tag(path.name) and not path.is_symlink())
        yield from (path.name for path in tags if is_foreign(path))
        yield from (replaced_tag(path) for path in replaced_directories(root) if is_foreign(path))


def step_of(directory: Path) -> int:
    """Return the step of the DeepSpeed checkpoint in `directory`; -1 where it cannot be read, for example without
    torch."""
    try:
        from .deepspeed import open_model

        return open_model(directory).step()
    except (CheckpointError, ImportError, TypeError, ValueError, OverflowError):
        return -1


def files_of(directory: Path) -> list[Path]:
    """Return those files of a tag directory of DeepSpeed that loading reads, sorted."""
    return sorted([*directory.glob("*_states.pt"), *directory.glob("zero/**/*.pt")])


def names_whole_deepspeed(root: Path, tag: str | None, *, checksums: bool) -> bool:
    """Return whether `tag` of a root is a checkpoint of DeepSpeed in which nothing is missing or damaged; False if
    `tag` is None.

    True also for one that cannot be judged here, as without torch or of a model-parallel run. With `checksums` all
    bytes of its files are read and compared with their checksums, otherwise only the structure is examined.
    """
    if tag is None or not is_tag(tag) or (root / tag).is_symlink() or not is_foreign(root / tag):
        return False
    try:
        open_foreign(root / tag)
        for file in files_of(root / tag) if checksums else ():
            verify_archive(file)
    except DamagedError:
        return False
    except CheckpointError:
        return True
    return True
