"""DeepSpeed's async_io as a peer for benchmarks: its installed extension, built on first use."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from .errors import AioError
from .measure import Sample, measure

__all__ = ["AsyncIo", "available"]


def available() -> bool:
    """Return whether DeepSpeed is installed; its extension may still fail to build on first use."""
    return importlib.util.find_spec("deepspeed") is not None


class AsyncIo:
    """One handle of DeepSpeed with one thread, for whole transfers of a file of `nbytes`; `block_bytes` per operation,
    `queue_depth` of them in flight.

    The constructor builds or loads DeepSpeed's extension; AioError if that fails. It sets the environment variable
    `DS_ACCELERATOR` to "cpu" unless it is set.
    """

    def __init__(self, nbytes: int, block_bytes: int, queue_depth: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            builder: Any = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
            extension = builder.load(verbose=False)
        except Exception as error:  # the builder raises whatever compiler, linker or import trouble there is
            raise AioError(f"DeepSpeed's async_io is not usable: {error!r}") from error
        self._torch: Any = importlib.import_module("torch")
        self._nbytes = nbytes
        # Argument order: block size, queue depth, single_submit, overlap_events, threads.
        self._handle = extension.aio_handle(block_bytes, queue_depth, False, True, 1)

    def pinned(self) -> Any:
        """Return a uint8 tensor for the whole file that DeepSpeed allocated and locked; for this handle only."""
        return self._handle.new_cpu_locked_tensor(self._nbytes, self._torch.empty(0, dtype=self._torch.uint8))

    def unpinned(self, memory: memoryview) -> Any:
        """Return a uint8 tensor over ``memory`` itself, without a copy; DeepSpeed then stages its transfers through
        memory of its own.
        """
        return self._torch.frombuffer(memory, dtype=self._torch.uint8)

    def run(self, kind: str, path: str, tensor: Any) -> Sample:
        """Read the whole file at `path` into `tensor`, or write `tensor` to it (`kind`: "read" or "write"), once, and
        return the timing; AioError if DeepSpeed does not complete it.
        """
        move = self._handle.sync_pread if kind == "read" else self._handle.sync_pwrite
        return measure(lambda: self._checked_nbytes(move(tensor, path)))

    def _checked_nbytes(self, operations: int) -> int:
        """Return the bytes of the file if `operations`, the number that DeepSpeed reports as completed, is 1; else
        AioError.
        """
        # DeepSpeed returns how many operations it completed, or -1.
        if operations != 1:
            raise AioError(f"DeepSpeed completed {operations} operations instead of 1")
        return self._nbytes
