"""Sharing blocks between files instead of copying them, where the file system can (XFS, btrfs and others)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from .._request import NATIVE_CODES
from ..errors import open_error, transfer_error

__all__ = ["block_bytes", "clone_range", "shares_blocks"]

_FICLONERANGE = 0x4020940D
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EISDIR, errno.EXDEV)


def block_bytes(folder: str) -> int:
    """Return the block size of a folder's file system, in bytes; only whole blocks are shared."""
    return os.statvfs(folder).f_bsize


def shares_blocks(folder: str) -> bool:
    """Return whether files in ``folder`` can share blocks, by trying it with two unnamed files.

    Raises the typed error of a transfer if the trial fails for another reason, such as a full disk.
    """
    opened: list[int] = []
    block = block_bytes(folder)
    try:
        for _ in range(2):
            opened.append(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        os.pwrite(opened[0], bytes(block), 0)
        _share_range(opened[0], 0, opened[1], 0, block)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            native = (error.errno or errno.EIO, 0, block, 0)
            raise transfer_error("write", folder, native, NATIVE_CODES) from None
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


def clone_range(source: str, offset: int, target: str, target_offset: int, nbytes: int) -> None:
    """Make ``nbytes`` of the file ``target``, from ``target_offset`` on, share the blocks of the file ``source`` from
    ``offset`` on; all three numbers are multiples of the block size. No bytes move; a later write to either file gets
    blocks of its own. OpenError if a file cannot be opened, the typed error of a transfer if the kernel refuses.
    """
    opened: list[int] = []
    try:
        for path, flags in ((source, os.O_RDONLY), (target, os.O_WRONLY)):
            try:
                opened.append(os.open(path, flags | os.O_CLOEXEC))
            except OSError as error:
                raise open_error(path, error) from None
        try:
            _share_range(opened[0], offset, opened[1], target_offset, nbytes)
        except OSError as error:
            native = (error.errno or errno.EIO, target_offset, nbytes, 0)
            raise transfer_error("clone", target, native, NATIVE_CODES) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _share_range(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> None:
    """Make the open file ``target`` share blocks of the open file ``source``; both are descriptors, offsets and
    ``nbytes`` are in bytes. OSError if the kernel refuses.
    """
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, offset, nbytes, target_offset))
