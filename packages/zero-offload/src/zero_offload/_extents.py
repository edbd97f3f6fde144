"""The only file that imports zero-nvme-aio (the `nvme` extra)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

import torch

from ._memory import pin_memory, pinned_by_torch
from ._protocols import ExtentStore
from .ends import HostUse, current_ends
from .errors import MissingExtraError, OffloadError, ShardCorruptError, ShardError, StoreFullError

__all__ = ["DTYPE_NAMES", "PathShares", "aligned_buffer", "measured_rates", "naming", "open_extents"]

#: The names of element types in files; other types are stored as bytes (U8).
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def _library() -> Any:
    """Return the module zero_nvme_aio; MissingExtraError if it is not installed."""
    try:
        import zero_nvme_aio
    except ImportError as error:
        raise MissingExtraError("the NVMe tier needs zero-nvme-aio; run: pip install 'zero-offload[nvme]'") from error
    return zero_nvme_aio


class PathShares(Protocol):
    """The folders of a store, with the share of the bytes that each gets and what it is called in messages."""

    @property
    def folders(self) -> Sequence[str]:
        """Return the paths of the folders."""

    @property
    def names(self) -> Sequence[str]:
        """Return what each folder is called in messages."""

    def shares(self) -> Sequence[float]:
        """Return the share of the store's bytes that each folder gets, from 0 to 1."""


def measured_rates(folders: Sequence[str]) -> list[float]:
    """Return the bytes per second of reading and writing at once in each folder. They are measured now, unless a
    process of this host did that in the last ten minutes. MissingExtraError without zero-nvme-aio, OffloadError for a
    folder that cannot be used.
    """
    library = _library()
    from zero_nvme_aio.path_rates import measure_paths

    try:
        return measure_paths(folders)
    except (library.AioError, OSError) as error:
        raise OffloadError(f"cannot measure {', '.join(folders)} for an NVMe tier: {error}") from error


def open_extents(paths: PathShares, *, prefix: str, checksums: bool, verify: bool, engine: Any = None) -> ExtentStore:
    """Return an empty extent store over the folders of ``paths``, whose file names begin with ``prefix``. Files that a
    killed process left under the same prefix are removed, sealed ones too, also from folders that only the earlier
    store had: a checkpoint has its own links to them. A folder that is full, fails or becomes slow is a warning while
    others can be written to.

    ``checksums`` are recorded as data is written; ``verify`` compares them on every read, and implies them. ``engine``:
    a ``zero_nvme_aio.Engine`` to share; None for one of its own. Raises OffloadError while another process uses the
    store, and for folders that cannot be used.
    """
    library, folders = _library(), list(paths.folders)
    ends = current_ends()
    engine = engine if ends is None else ends.io_engine(engine)

    try:
        _remove_files([folder for folder in folders if os.path.isdir(folder)], prefix)
        shares = list(paths.shares())  # which measures the folders, so there must be room
        store = library.ExtentStore(
            folders,
            prefix=prefix,
            checksums=checksums or verify,
            verify=verify,
            engine=engine,
            weights=shares,
            names=paths.names,
            tell=lambda text: warnings.warn(f"{prefix}: {text}", stacklevel=2),
        )
    except library.AioError as error:
        raise OffloadError(f"cannot use {', '.join(folders)} as an NVMe tier: {error}") from error
    except OSError as error:
        raise OffloadError(
            f"cannot use {', '.join(folders)} as an NVMe tier: {error}; name writable folders"
        ) from error
    for folder in store.former_paths():
        _remove_former_files(folder, prefix)
    return cast(ExtentStore, store)


def _remove_former_files(folder: str, prefix: str) -> None:
    """Remove the files of the store named ``prefix`` from a folder that it no longer has; do nothing if another process
    uses them, or if the folder is gone or cannot be used.
    """
    library = _library()
    with suppress(library.AioError, OSError):
        if os.path.isdir(folder):
            _remove_files([folder], prefix)


def _remove_files(folders: Sequence[str], prefix: str) -> None:
    """Remove all files of the store named ``prefix`` from these folders: sealed ones, damaged ones, and those of which
    a part is in other folders. Raises the library's ExtentError while a process has the store open.
    """
    _library()
    from zero_nvme_aio.leftovers import remove_store

    remove_store(folders, prefix)


def aligned_buffer(nbytes: int, use: HostUse) -> torch.Tensor:
    """Return ``nbytes`` of host memory, as uint8, aligned for direct I/O; pinned if ``use`` says so."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    ends = current_ends()
    if ends is not None:
        return ends.host_memory(nbytes, use)
    own = pinned_by_torch(nbytes) if use.pin else None
    if own is not None:
        return own
    memory = torch.frombuffer(_library().AlignedBuffer(nbytes), dtype=torch.uint8)
    if use.pin:
        pin_memory(memory)
    return memory


@contextmanager
def naming(tensor: str, action: str) -> Iterator[None]:
    """Return a context manager that turns an error of the I/O library inside its block into a ShardError that names
    ``tensor``, the file and the offset. ``action``: a verb for the message ("read", "write").

    It is a ShardCorruptError for a file that is too short or has a wrong checksum, a StoreFullError for a full disk or
    quota.
    """
    library = _library()
    try:
        yield
    except library.AioError as error:
        kind = _shard_error_class(library.errors, error)
        where = "" if error.path is None else f" ('{error.path}' at offset {error.offset})"
        raise kind(
            f"cannot {action} '{tensor}'{where}: {error}",
            tensor=tensor,
            path=error.path,
            offset_bytes=error.offset,
        ) from error


def _shard_error_class(errors: Any, error: Exception) -> Callable[..., ShardError]:
    """Return the exception class for an error of the I/O library: ShardCorruptError for a wrong checksum or a file that
    is too short, StoreFullError for a full disk or quota, ShardError for any other. ``errors``: the library's module of
    errors.
    """
    if isinstance(error, (errors.ChecksumError, errors.EndOfFileError)):
        return ShardCorruptError
    if isinstance(error, errors.NoSpaceError):
        return StoreFullError
    return ShardError
