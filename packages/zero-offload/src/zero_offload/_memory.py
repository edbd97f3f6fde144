"""Host memory in exact sizes: torch's own pinned allocator rounds every request up to a power of two."""

from __future__ import annotations

import mmap
import warnings
import weakref
from typing import Any

import torch

from .ends import HostUse, current_ends

__all__ = ["HostBlock", "PAGE", "anonymous_memory", "nbytes_of", "page_rounded", "pin_memory", "pinned_by_torch"]

PAGE = mmap.PAGESIZE


def page_rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages of the system (`PAGE` bytes)."""
    return -(-nbytes // PAGE) * PAGE


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class HostBlock:
    """``nbytes`` of zeroed, page-aligned host memory; resident once touched. ``tensor`` is the memory as uint8 (1-D).

    ``use`` says what the memory is for; it is pinned if ``use.pin`` (see `pinned_by_torch` and `pin_memory`). Inside
    `tier_ends` the memory comes from there. The memory is freed with the last tensor over it.
    """

    def __init__(self, nbytes: int, use: HostUse) -> None:
        self.nbytes = nbytes
        ends = current_ends()
        if ends is not None and nbytes:
            self.tensor = ends.host_memory(nbytes, use)
            return
        own = pinned_by_torch(nbytes) if use.pin and nbytes else None
        self.tensor = anonymous_memory(nbytes) if own is None else own
        if use.pin and nbytes and own is None:
            pin_memory(self.tensor)

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements of ``dtype`` at ``offset_bytes``, a multiple of the element size, as a 1-D tensor
        over the block's memory.
        """
        return self.tensor[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)


def anonymous_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of zeroed, page-aligned memory of the system, as uint8, in huge pages where possible; freed
    with the last tensor over it.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 1 << 21:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pinned_by_torch(nbytes: int) -> torch.Tensor | None:
    """Return ``nbytes`` of zeroed, page-aligned memory that torch has pinned for the accelerator, as uint8 (1-D). torch
    may round the size up to a power of two.

    None without an accelerator, if torch cannot pin, and for CUDA and ROCm, for which `pin_memory` registers memory of
    an exact size.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "cuda":
        return None
    for more in (0, PAGE):
        try:
            memory = torch.zeros(nbytes + more, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return None
        start = -memory.data_ptr() % PAGE
        if start <= more:
            return memory[start : start + nbytes]
    return None


def pin_memory(memory: torch.Tensor) -> bool:
    """Register host memory with CUDA, so that copies run beside compute, for as long as the tensor object ``memory``
    lives. Return True, or False if that fails: then the memory stays pageable, and a warning says why.
    """
    if not torch.cuda.is_available():
        reason = "there is no accelerator for which it can be pinned"
    else:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(memory.data_ptr(), nbytes_of(memory), 0))
        if code == 0:
            weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
            return True
        reason = f"cudaHostRegister of {nbytes_of(memory)} bytes failed with code {code}"
    warnings.warn(f"host memory stays pageable: {reason}; copies wait for each other", stacklevel=3)
    return False
