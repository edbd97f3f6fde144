"""Host memory in exact sizes: torch's own pinned allocator rounds every request up to a power of two."""

from __future__ import annotations

import mmap
import warnings
import weakref
from typing import Any

import torch

__all__ = ["PAGE", "HostBlock", "nbytes_of", "page_rounded"]

PAGE = mmap.PAGESIZE


def page_rounded(nbytes: int) -> int:
    """The next multiple of the page size."""
    return -(-nbytes // PAGE) * PAGE


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class HostBlock:
    """``nbytes`` of zeroed, page-aligned host memory; resident once touched.

    ``pin`` registers it with CUDA, so that copies run beside compute; where that is refused the block stays pageable
    and a warning says why. ``tensor`` is the memory as uint8.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.nbytes = nbytes
        self.pinned = False
        if nbytes == 0:
            self.tensor = torch.empty(0, dtype=torch.uint8)
            return
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= 1 << 21:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if pin:
            self._pin()

    def _pin(self) -> None:
        if not torch.cuda.is_available():
            warnings.warn(
                "host memory stays pageable: only CUDA and ROCm can register memory of an exact size; copies wait",
                stacklevel=3,
            )
            return
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.tensor.data_ptr()
        code = int(cudart.cudaHostRegister(address, self.nbytes, 0))
        if code != 0:
            warnings.warn(
                f"host memory stays pageable: cudaHostRegister of {self.nbytes} bytes failed with code {code}; "
                "copies wait for each other",
                stacklevel=3,
            )
            return
        self.pinned = True
        weakref.finalize(self, cudart.cudaHostUnregister, address)

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements of ``dtype`` at a byte offset that is a multiple of the element size."""
        return self.tensor[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)
