"""Check zip archives of `torch.save` before anything in them is trusted.

A record is one file inside the archive. `path` names the archive in errors.
"""

from __future__ import annotations

import os
import struct
import zipfile
from io import BufferedReader
from pathlib import Path

from ..errors import CheckpointError, DamagedError
from ..opened import open_regular, read_fd

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_MAX_DIRECTORY_BYTES = 256 << 20
_MAX_PICKLE_BYTES = 256 << 20
_READ_BYTES = 8 << 20


def require_stored_archive(path: Path) -> None:
    """Raise unless `path` is a zip archive as `torch.save` writes it: nothing compressed, no name twice, sizes bounded.

    Sizes are checked before memory is allocated for them. Raises CheckpointError, and its subclass DamagedError for a
    damaged archive.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        _require_stored_and_bounded(file, path)


def _require_stored_and_bounded(file: BufferedReader, path: Path) -> None:
    """Check an open archive as `require_stored_archive` does, and raise as that does."""
    try:
        nbytes = directory_nbytes(file.fileno(), str(path))
        if nbytes > _MAX_DIRECTORY_BYTES:
            raise CheckpointError(f"{path}: a zip directory of {nbytes} bytes, expected at most {_MAX_DIRECTORY_BYTES}")
        _require_stored(file, os.fstat(file.fileno()).st_size, path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError) as error:
        raise DamagedError(f"{path}: the zip archive is damaged: {error}") from error


def directory_nbytes(fd: int, where: str, begin: int = 0, length: int | None = None) -> int:
    """Return the size in bytes of an archive's central directory, which the record at the archive's very end gives, as
    `torch.save` writes it.

    The archive is the file `fd`, or `length` bytes of it from `begin` on; `where` names it in errors. Raises
    CheckpointError when it is no such archive, DamagedError when it is damaged.
    """
    end = os.fstat(fd).st_size if length is None else begin + length
    if end == begin:
        raise DamagedError(f"{where} is empty")
    if end - begin < _END.size:
        raise CheckpointError(f"{where} is not in torch's zip format: it has {end - begin} bytes")
    raw = bytearray(_END.size)
    read_fd(fd, end - _END.size, memoryview(raw), where)
    magic, *_, nbytes, _, comment = _END.unpack(raw)
    if magic != b"PK\5\6" or comment:
        first = bytearray(4)
        read_fd(fd, begin, memoryview(first), where)
        if first == b"PK\3\4":
            raise DamagedError(f"{where}: the zip archive is damaged: its end is missing")
        raise CheckpointError(
            f"{where} is not in torch's zip format (files that torch wrote before version 1.6 are not read; load and "
            "save them with torch once)"
        )
    at = end - _END.size - _END64_LOCATOR.size
    if at < begin:
        return int(nbytes)
    raw = bytearray(_END64_LOCATOR.size)
    read_fd(fd, at, memoryview(raw), where)
    magic, _, place, _ = _END64_LOCATOR.unpack(raw)
    if magic != b"PK\6\7":
        return int(nbytes)
    if begin + place + _END64.size > at:
        raise DamagedError(f"{where}: the zip archive is damaged: its end lies outside of it")
    raw = bytearray(_END64.size)
    read_fd(fd, begin + place, memoryview(raw), where)
    return int(_END64.unpack(raw)[-2])


def _require_stored(file: BufferedReader, nbytes: int, path: Path) -> None:
    """Raise CheckpointError for a compressed record or a pickle of more than 256 MiB, and DamagedError for a name that
    is there twice or a record that reaches beyond the end of the file, which has `nbytes` bytes."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    names = set()
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise CheckpointError(
                f"{path}: record {record.filename!r} is compressed ({record.compress_size} bytes that become "
                f"{record.file_size}), which torch.save never does; load and save it with torch once"
            )
        if record.filename in names:
            raise DamagedError(f"{path}: record {record.filename!r} is there twice")
        if record.header_offset + record.file_size > nbytes:
            raise DamagedError(f"{path}: record {record.filename!r} reaches beyond the end of the file")
        if record.filename.endswith(".pkl") and record.file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError(f"{path}: a pickle of {record.file_size} bytes, expected at most {_MAX_PICKLE_BYTES}")
        names.add(record.filename)


def verify_archive(path: Path) -> None:
    """Compare the CRC-32 of every record of the `torch.save` file `path` with the record's content, reading 8 MiB at a
    time.

    Records without a checksum, which torch can be told to leave out, are passed over. Raises DamagedError, naming the
    file, when a checksum differs or the archive cannot be read, also for a link and for what is no regular file. Before
    anything is read, the archive is checked as `require_stored_archive` does, with its errors.
    """
    try:
        fd = open_regular(path)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror or error}") from error
    with os.fdopen(fd, "rb") as file:
        _require_stored_and_bounded(file, path)
        _verify_records(file, path)


def _verify_records(file: BufferedReader, path: Path) -> None:
    """Read all records of an open archive, which compares their checksums; the archive has passed
    `require_stored_archive`. Raises DamagedError when a checksum differs or a record cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.CRC:
                    with archive.open(record) as content:
                        while content.read(_READ_BYTES):
                            pass
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError, EOFError) as error:
        raise DamagedError(f"{path} is damaged: {error}; restore it from another copy, or load another tag") from error
