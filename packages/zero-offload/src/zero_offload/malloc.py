"""The C library's allocator, of which torch takes its tensors on the CPU.

[Note: freed memory] glibc asks the system for each large block and gives it back when it is freed. A training step
frees most of what it allocates, so every step would have the system map and clear its gigabytes again, page by page.
`keep_freed_memory` makes glibc serve large blocks from its heap, and never shrink the heap. The price is
fragmentation: the process keeps the largest amount that it ever had in use, and some more.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from .ends import current_ends
from .errors import OffloadError

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # parameters of mallopt(3)
_LARGE = 1 << 20
"""Blocks from so many bytes on are separate mappings where freed memory is returned."""


def keep_freed_memory(keep: bool) -> None:
    """Make the process keep memory that is freed, for the next allocation, or else return large blocks to the system.

    Holds for the whole process, until the next call; does nothing in a dry run. Raises `OffloadError` if the C library
    has no such setting.
    """
    if current_ends() is not None:
        return
    options = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1} if keep else {_MMAP_MAX: 1 << 16, _MMAP_THRESHOLD: _LARGE}
    if not keep:
        options[_TRIM_THRESHOLD] = _LARGE
    set_option = _function("mallopt")
    if set_option is None or not all(set_option(name, value) for name, value in options.items()):
        raise OffloadError("keep_freed_memory: this system's C library has no mallopt; leave the key out")


def is_tunable(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `keep_freed_memory` works here and would override no choice of the user: the C library has the
    settings, and the environment variables in ``environ`` set none of them.
    """
    tuned = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    return _function("mallopt") is not None and not tuned


def return_free_memory() -> None:
    """Return unused memory of the allocator's heap to the system; do nothing if the C library has no function
    for that.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def allocated_bytes() -> int | None:
    """Return the bytes that the allocator has given out and that are in use; None if the C library cannot tell."""
    ask = _function("mallinfo2")
    if ask is None:
        return None
    state = ask()
    return int(state.uordblks) + int(state.hblkhd)


class _MallocState(ctypes.Structure):
    """The C library's ``struct mallinfo2``, which `allocated_bytes` reads; sizes are in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@cache
def _function(name: str) -> Any:
    """Return the C library's function ``name``, with the return type that ``mallinfo2`` needs; None if the library has
    no such function.
    """
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None and name == "mallinfo2":
        found.restype = _MallocState
    return found
