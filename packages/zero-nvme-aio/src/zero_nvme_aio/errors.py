"""The exceptions of this package: every one is an `AioError` with the details in its fields."""

from __future__ import annotations

import errno as _errno
import os

TYPE_CHECKING = False  # importing typing costs a third of the whole import
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "AccessError",
    "AioError",
    "BackendUnavailableError",
    "ChecksumError",
    "ClosedError",
    "DeviceError",
    "DirectoryPathError",
    "EndOfFileError",
    "ExtentError",
    "FormatError",
    "InvalidBufferError",
    "InvalidOffsetError",
    "MissingPathError",
    "NoSpaceError",
    "OpenError",
    "RequestCancelledError",
    "TransferError",
    "WaitTimeoutError",
]


class AioError(OSError):
    """Base of the errors of this package; an `OSError`, with `errno` and `filename` set.

    `path`: the file as the user named it. `offset`, `expected`, `got`: bytes. `free_bytes`: the free space of the file
    system. Each is None where it does not apply. `message`: what failed, and what to do.
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        offset: int | None = None,
        expected: int | str | None = None,
        got: int | str | None = None,
        free_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.errno = errno
        self.filename = path
        self.path = path
        self.offset = offset
        self.expected = expected
        self.got = got
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild the error with its fields, for pickling."""
        fields = {name: getattr(self, name) for name in ("errno", "path", "offset", "expected", "got", "free_bytes")}
        return _rebuild, (type(self), self.message, fields)


def _rebuild(cls: type[AioError], message: str, fields: dict[str, Any]) -> AioError:
    """Return an error of class `cls` with this message and these fields, by name, as pickling saved them."""
    return cls(message, **fields)


class InvalidBufferError(AioError, ValueError):
    """The memory cannot be used: not contiguous, read-only as a target, not in host memory, or of the wrong size."""


class InvalidOffsetError(AioError, ValueError):
    """A file offset or length is negative, or beyond what a file can hold (2**63 - 1)."""


class ClosedError(AioError, ValueError):
    """The engine, file or store is closed."""


class OpenError(AioError):
    """A file could not be opened."""


class MissingPathError(OpenError, FileNotFoundError):
    """The path does not exist."""


class DirectoryPathError(OpenError, IsADirectoryError):
    """The path is a directory."""


class AccessError(OpenError, PermissionError):
    """The file may not be opened in this mode, or is used against its mode."""


class TransferError(AioError):
    """The operating system refused a transfer; `errno` says why."""


class DeviceError(TransferError):
    """The device failed (EIO)."""


class NoSpaceError(TransferError):
    """The file system, or the user's quota, is full (ENOSPC, EDQUOT); `free_bytes` says what is left."""


class EndOfFileError(TransferError, EOFError):
    """The file ended before the request did: it is shorter than asked for, or shrank meanwhile."""


class RequestCancelledError(AioError):
    """The request was cancelled before all of it was started."""


class WaitTimeoutError(AioError, TimeoutError):
    """The request is still under way after the given time; it continues, and can be waited for again."""


class BackendUnavailableError(AioError):
    """The backend does not run here; the message is the reason that `probe()` reports."""


class ChecksumError(AioError):
    """The data read differs from the data written; `expected` and `got` are the checksums."""


class FormatError(AioError, ValueError):
    """A file violates its format."""


class ExtentError(AioError, LookupError):
    """A name, or a range of it, is not in the extent store, or does not fit what was declared."""


def open_error(path: str, error: OSError) -> OpenError:
    """Return the typed error, to be raised, for the file at `path` that could not be opened; the errno of `error`
    chooses the class.
    """
    code = error.errno
    kinds: dict[int | None, tuple[type[OpenError], str]] = {
        _errno.ENOENT: (MissingPathError, "it does not exist; mode 'w' or 'rw' creates it, in a directory that exists"),
        _errno.EISDIR: (DirectoryPathError, "it is a directory; name a file in it"),
        _errno.EACCES: (AccessError, "permission denied"),
        _errno.EPERM: (AccessError, "not permitted"),
        _errno.EROFS: (AccessError, "the file system is read-only"),
    }
    spoken = str(error.args[1]) if len(error.args) > 1 else str(error)
    kind, reason = kinds.get(code, (OpenError, spoken))
    return kind(f"cannot open '{path}': {reason}", errno=code, path=path)


def transfer_error(kind: str, path: str, native: tuple[int, int, int, int], native_codes: tuple[int, int]) -> AioError:
    """Return the typed error, to be raised, for a failed request of `kind` ("read", "write", …) on the file at `path`.

    `native`: (code, offset in the file, bytes expected, bytes moved), as the native engine reports it; the code is an
    errno, or one of `native_codes`: (code for end of file, code for cancelled).
    """
    code, offset, expected, got = native
    end_of_file, cancelled = native_codes
    where = f"'{path}' at offset {offset}"
    fields: dict[str, Any] = {"path": path, "offset": offset, "expected": expected, "got": got}
    if code == end_of_file:
        message = (
            f"read of {where} expected {expected} bytes more but the file ends there; is it the file that was written?"
        )
        return EndOfFileError(message, **fields)
    if code == cancelled:
        return RequestCancelledError(f"{kind} of {where} was cancelled", **fields)
    fields["errno"] = code
    if code in (_errno.ENOSPC, _errno.EDQUOT):
        free = free_bytes(path)
        quota = "the quota is used up" if code == _errno.EDQUOT else "no space is left"
        left = "" if free is None else f" ({free} bytes free)"
        message = f"{kind} of {expected} bytes to {where}: {quota}{left}; free some or write elsewhere"
        return NoSpaceError(message, free_bytes=free, **fields)
    message = f"{kind} of {where}: expected {expected} bytes, got {got}: {os.strerror(code)}"
    if code == _errno.EIO:
        return DeviceError(f"{message}; the device failed, see the kernel log", free_bytes=free_bytes(path), **fields)
    if code == _errno.EFAULT:
        message += "; its memory is gone: keep tensors at their size, and their storage, until the request is done"
    if code in (_errno.EPERM, _errno.ENOSYS):
        message += (
            "; the kernel refuses this engine's system call (a seccomp filter that was set after the engine was made); "
            "make an engine with backend='threads'"
        )
    if code == _errno.EINVAL:
        message += "; if the file system does no direct I/O here, open the file with direct=False"
    return TransferError(message, **fields)


def free_bytes(path: str) -> int | None:
    """Return the bytes that this user may still write on the file system of `path`; None if the file system does not
    tell.
    """
    try:
        info = os.statvfs(path)
    except OSError:
        return None
    return info.f_bavail * info.f_frsize
