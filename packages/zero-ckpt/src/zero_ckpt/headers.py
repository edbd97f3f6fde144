"""Read the header of a checkpoint's data file and check it against the manifest."""

from __future__ import annotations

from .checksum import checksum
from .errors import DamagedError
from .manifest import FileEntry
from .opened import Folder
from .safetensors_file import MAX_HEADER_BYTES, HeaderEntry, parse_header


def read_raw_header(folder: Folder, entry: FileEntry) -> bytes:
    """Return the bytes of a data file's header. Raises DamagedError when it is too large, cannot be read, or its
    checksum does not hold."""
    where = str(folder.path / entry.path)
    if entry.header_nbytes > MAX_HEADER_BYTES:
        raise DamagedError(
            f"{where}: the manifest gives it a header of {entry.header_nbytes} bytes, expected at most "
            f"{MAX_HEADER_BYTES}"
        )
    raw = bytearray(entry.header_nbytes)
    folder.read_at(entry.path, 0, memoryview(raw), where)
    if checksum(raw) != entry.header_checksum:
        raise DamagedError(f"{where}: the header is damaged (its checksum does not hold)")
    return bytes(raw)


def read_entries(folder: Folder, entry: FileEntry) -> dict[str, HeaderEntry]:
    """Return the entries in the header of a checkpoint's safetensors file, by key. Raises DamagedError when the header
    is damaged or not valid."""
    return parse_header(read_raw_header(folder, entry), entry.nbytes, str(folder.path / entry.path))[0]
