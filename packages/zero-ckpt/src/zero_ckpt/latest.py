"""The file `latest` of a root, a directory of checkpoints: the tag of the newest checkpoint, and a checksum that other
readers strip away.

[Note: the checksum of latest]
Many programs read `latest` as text and strip it, so the tag stands alone in its first line. The second line is the
xxh3_64 of the tag's bytes, 64 bits from the highest on, a space for each 0 and a tab for each 1. A file without a
second line was written by an earlier version, by another program or by hand, and is believed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import xxhash

from .durable import fsync_directory, write_durably
from .errors import CheckpointError, DamagedError
from .locking import root_lock
from .opened import open_regular, read_bounded

LATEST_NAME = "latest"
_MAX_BYTES = 4096
_BITS = 64


def is_tag(text: str) -> bool:
    """Return whether `text` can name a checkpoint directory.

    That is one path component of at most 200 bytes that does not begin with a period and is not `latest`.
    """
    if not text or text.startswith(".") or "/" in text or "\0" in text:
        return False
    try:
        return text != LATEST_NAME and len(text.encode()) <= 200
    except UnicodeEncodeError:  # half of a surrogate pair, which no file of the format can hold
        return False


def check_tag(tag: str) -> str:
    """Return `tag` if it can name a checkpoint directory (see `is_tag`). Raises CheckpointError if it cannot."""
    if not is_tag(tag):
        raise CheckpointError(
            f"{tag!r} cannot be a tag: expected one path component of at most 200 bytes that does not start with a "
            f"period and is not {LATEST_NAME!r}"
        )
    return tag


def check_new_tag(tag: str) -> str:
    """Return `tag` if a checkpoint may be saved under it.

    Raises CheckpointError for what `check_tag` refuses, and for a tag that would read back as another one: readers of
    `latest` take its first line and strip it.
    """
    if check_tag(tag) != tag.partition("\n")[0].strip():
        raise CheckpointError(
            f"{tag!r} cannot be a tag: expected no space at its beginning or end and one line, as the file "
            f"{LATEST_NAME!r} is read"
        )
    return tag


def encode_latest(tag: str) -> bytes:
    """Return the contents of the file `latest` for a tag."""
    return f"{tag}\n{_checksum_line(tag)}".encode()


def _checksum_line(tag: str) -> str:
    """Return the second line of the file `latest`: the checksum of `tag` in spaces and tabs."""
    return f"{xxhash.xxh3_64_intdigest(tag.encode()):0{_BITS}b}".replace("0", " ").replace("1", "\t")


def decode_latest(raw: bytes, where: str) -> str:
    """Return the tag in `raw`, the contents of a file `latest`: its first line, stripped. Raises DamagedError, whose
    message begins with `where`, when the checksum in the second line is not the tag's; a file without a second line is
    believed."""
    first, _, seal = raw.decode(errors="replace").partition("\n")
    tag = first.strip()
    if seal.strip("\r\n") and seal != _checksum_line(tag):
        raise DamagedError(
            f"{where}: `latest` is damaged: its checksum does not hold for the tag {tag!r} (to "
            "choose a tag by hand, write it alone)"
        )
    return tag


def read_latest(root: Path) -> str | None:
    """Return the tag that `<root>/latest` names, or None when there is no such file.

    Raises DamagedError when it is no regular file, is too large, or its checksum does not hold.
    """
    path = root / LATEST_NAME
    try:
        fd = open_regular(path)
        try:
            raw = read_bounded(fd, _MAX_BYTES, str(path))
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedError(f"{path}: `latest` cannot be read: {error.strerror or error}") from error
    return decode_latest(raw, str(path))


def write_latest(root: Path, tag: str) -> None:
    """Point `<root>/latest` at `tag`, atomically and durably. Raises CheckpointError when `latest` is a directory or
    the root stays locked for ten minutes.
    """
    temporary = root / f".saving-{LATEST_NAME}.{os.urandom(6).hex()}"
    with root_lock(root):
        require_replaceable(root)
        try:
            write_durably(temporary, encode_latest(tag))
            temporary.replace(root / LATEST_NAME)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_directory(root)


def require_replaceable(root: Path) -> None:
    """Raise CheckpointError when `<root>/latest` is a directory, which no file can take the place of."""
    path = root / LATEST_NAME
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{path} is a directory, but must be the file that names the newest tag; move it away ("
            f"{os.strerror(errno.EISDIR)})"
        )
