"""How fast the drives of several folders are, measured once for all processes of a host."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Sequence

from ._engine import Engine
from ._file import File
from ._memory import AlignedBuffer

__all__ = ["measure_paths"]

PAGE = 4096
_BLOCK_BYTES = 4 << 20
_BLOCKS_AT_ONCE = 4
_MOST_BLOCKS = 16
_FIRST_SECONDS = 0.5  # bound of the first write, which makes the file
_LONG_SECONDS = 0.5  # a pass that took longer is not repeated
_PASSES = 3


def measure_paths(folders: Sequence[str | os.PathLike[str]], *, valid_seconds: float = 600.0) -> list[float]:
    """Return the bytes per second of reading and writing at once in each folder, for `ExtentStore(weights=…)`.

    Missing folders are made. Each is measured with a file of 16 to 64 MiB, or of half the space that is free if that
    is less, for a second at most unless it is slower, and the result recorded in it, in `path-rate.<host>.json`, or for
    a second user `path-rate.<host>.<uid>.json`. A record of this host and user that is not older than `valid_seconds`
    is used: processes that start together measure each folder once, one after the other. Raises AioError and OSError
    for a folder that cannot be used.
    """
    return [_recorded_or_measured_rate(os.path.abspath(folder), valid_seconds) for folder in folders]


def _recorded_or_measured_rate(folder: str, valid_seconds: float) -> float:
    """Return the bytes per second of a folder, which is made if it is missing: from its record if that is not older
    than `valid_seconds`, else measured now and recorded. Waits while another process does that.
    """
    os.makedirs(folder, exist_ok=True)
    descriptor = _open_record(folder)
    if descriptor is None:
        return _measure_rate(folder)
    with open(descriptor, "r+") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        try:
            known = _parse_record(record.read(1 << 12), os.fstat(descriptor).st_dev, valid_seconds)
            if known is not None:
                return known
            rate = _measure_rate(folder)
            entry = {"bytes_per_s": rate, "device": os.fstat(descriptor).st_dev, "measured_at": time.time()}
            record.seek(0)
            record.truncate()
            record.write(json.dumps(entry))
            record.flush()
            return rate
        finally:
            fcntl.flock(record, fcntl.LOCK_UN)


def _open_record(folder: str) -> int | None:
    """Open this user's record file in a folder, made if it is missing, and return the descriptor. None if files that
    this user does not own, or that others may write to, have both of its possible names. OSError if no file can be made
    there.
    """
    host, user = os.uname().nodename, os.geteuid()
    for name in (f"path-rate.{host}.json", f"path-rate.{host}.{user}.json"):
        path = os.path.join(folder, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
                continue
            raise
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            return descriptor
        os.close(descriptor)
    return None


def _parse_record(text: str, device: int, valid_seconds: float) -> float | None:
    """Return the bytes per second in a record's text; None if it is older than `valid_seconds`, of another `device`
    (the `st_dev` of the file) or not a record.
    """
    try:
        entry = json.loads(text)
        rate, measured_at = float(entry["bytes_per_s"]), float(entry["measured_at"])
        fresh = entry["device"] == device and 0 <= time.time() - measured_at <= valid_seconds
    except (ValueError, TypeError, KeyError):
        return None
    return rate if fresh and 0 < rate < float("inf") else None


def _measure_rate(folder: str) -> float:
    """Return the bytes per second, read and written together, of the fastest of up to three passes over a new file in
    `folder`. A pass writes one half of the file's blocks while it reads the other. The first write is not measured:
    drives and file systems allocate space then.
    """
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    block = min(_BLOCK_BYTES, max(1, free // (2 * _MOST_BLOCKS) // PAGE) * PAGE)
    data, into = AlignedBuffer(block), AlignedBuffer(block)
    memoryview(data)[:] = os.urandom(block)
    with tempfile.TemporaryDirectory(dir=folder, prefix="path-rate-") as inside, Engine() as engine:
        with engine.open(os.path.join(inside, "data"), "rw") as file:
            blocks, end = 0, time.perf_counter() + _FIRST_SECONDS
            while blocks < _MOST_BLOCKS and (not blocks or time.perf_counter() < end):
                _write_and_read_blocks(engine, file, data, into, range(blocks, blocks + _BLOCKS_AT_ONCE), range(0))
                blocks += _BLOCKS_AT_ONCE
            engine.sync(file)
            best = 0.0
            for _ in range(_PASSES):
                begin = time.perf_counter()
                _write_and_read_blocks(engine, file, data, into, range(0, blocks, 2), range(1, blocks, 2))
                seconds = time.perf_counter() - begin
                best = max(best, blocks * block / seconds)
                if seconds > _LONG_SECONDS:
                    break
            return best


def _write_and_read_blocks(
    engine: Engine, file: File, data: AlignedBuffer, into: AlignedBuffer, written: range, read: range
) -> None:
    """Write `data` to the blocks of a file whose numbers are in `written`, and read those in `read` into `into`, all at
    once; wait for all. A block is as long as `data` and `into`.
    """
    requests = [engine.write(file, data, number * len(data)) for number in written]
    requests += [engine.read(file, into, number * len(into)) for number in read]
    for request in requests:
        request.wait()
