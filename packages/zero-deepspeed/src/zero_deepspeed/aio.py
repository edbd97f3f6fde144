"""`deepspeed.ops.aio`: `aio_handle` over zero-nvme-aio."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

from zero_core.errors import UsageError
from zero_offload import MissingExtraError


class AsyncIOBuilder:
    """DeepSpeed's builder of its operator for file I/O, for scripts that call it; nothing is built."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether zero-nvme-aio is installed; ``verbose`` has no effect."""
        return is_available()

    def load(self, verbose: bool = False) -> Any:
        """Return this module, which has `aio_handle`; ``verbose`` has no effect."""
        import zero_deepspeed.aio as module

        return module


class aio_handle:
    """Reads CPU tensors from files and writes them to files. Offsets and ``block_size`` are in bytes.

    The arguments are options of the configuration's section `aio`; a method `get_...` explains each. Asynchronous calls
    return 0; `wait` finishes them, and raises what they failed with. A synchronous call finishes all transfers in
    flight and returns their number: 1 if it is the only one. Every transfer raises `UsageError` for a tensor that is
    not contiguous or not on the CPU. Raises `MissingExtraError` where zero-nvme-aio is not installed.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._options = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "single_submit": single_submit,
            "overlap_events": overlap_events,
            "intra_op_parallelism": intra_op_parallelism,
        }
        self._engine = _new_io_engine(self._options)
        self._pending: list[tuple[Any, Any, torch.Tensor]] = []

    def get_block_size(self) -> int:
        """Return the number of bytes per request to the device."""
        return int(self._options["block_size"])

    def get_queue_depth(self) -> int:
        """Return the number of requests in flight at once."""
        return int(self._options["queue_depth"])

    def get_single_submit(self) -> bool:
        """Return whether requests are submitted one by one."""
        return bool(self._options["single_submit"])

    def get_overlap_events(self) -> bool:
        """Return whether completions are collected while others are submitted."""
        return bool(self._options["overlap_events"])

    def get_intra_op_parallelism(self) -> int:
        """Return the number of threads per transfer."""
        return int(self._options["intra_op_parallelism"])

    def new_cpu_locked_tensor(self, num_elem: int, example: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised 1-D CPU tensor of ``num_elem`` elements and ``example``'s dtype, in pinned memory if
        there is an accelerator."""
        return torch.empty(num_elem, dtype=example.dtype, pin_memory=torch.accelerator.is_available())

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Return True; the memory is freed with the tensor."""
        return True

    def sync_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Read ``buffer.nbytes`` bytes of the file, from ``file_offset`` on, into ``buffer``; finish all transfers in
        flight and return their number.
        """
        self.async_pread(buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write ``buffer`` to the file at ``file_offset``, made if it is missing; finish all transfers in flight and
        return their number.
        """
        self.async_pwrite(buffer, filename, file_offset)
        return self.wait()

    read = sync_pread
    write = sync_pwrite

    def async_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Begin to read into ``buffer`` as `sync_pread` does; return 0. Do not use ``buffer`` until `wait`."""
        self._begin_transfer(self._engine.read, buffer, filename, "r", file_offset)
        return 0

    def async_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Begin to write ``buffer`` as `sync_pwrite` does; return 0. Do not change ``buffer`` until `wait`."""
        self._begin_transfer(self._engine.write, buffer, filename, "rw", file_offset)
        return 0

    def wait(self) -> int:
        """Finish everything that was begun, close the files, and return how many transfers that were. If some failed,
        raise the last one's error once all have ended; nothing is pending then.
        """
        pending, self._pending = self._pending, []
        with ExitStack() as ends:  # it calls what it was given last first, each although others raise
            for request, file, _ in reversed(pending):
                ends.callback(file.close)
                ends.callback(request.wait)
        return len(pending)

    def _begin_transfer(
        self, start: Any, buffer: torch.Tensor, filename: str | os.PathLike[str], mode: str, file_offset: int
    ) -> None:
        """Open the file in ``mode`` ("r" or "rw") and begin a transfer with ``buffer`` for `wait` to finish.

        ``start``: the I/O engine's method that reads or writes. Leaves no file open if it raises. Raises `UsageError`,
        before the file is opened, for a tensor that is not contiguous or not on the CPU.
        """
        data = _checked_buffer(buffer)
        file = self._engine.open(os.fspath(filename), mode)
        try:
            request = start(file, data, file_offset)
        except BaseException:
            file.close()
            raise
        self._pending.append((request, file, buffer))


def is_available() -> bool:
    """Return whether zero-nvme-aio is installed."""
    from importlib.util import find_spec

    return find_spec("zero_nvme_aio") is not None


def _new_io_engine(options: dict[str, Any]) -> Any:
    """Return a new I/O engine of zero-nvme-aio with ``options``, which have the keys of the section `aio`;
    `MissingExtraError` where that package is not installed."""
    try:
        from zero_nvme_aio import Engine
    except ImportError as error:
        raise MissingExtraError("aio_handle needs zero-nvme-aio; run: pip install 'zero-core[nvme]'") from error
    return Engine.from_deepspeed(options)


def _checked_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, detached, over the same memory; `UsageError` unless it is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError("aio_handle moves contiguous CPU tensors; call .cpu().contiguous() first")
    return tensor.detach()
