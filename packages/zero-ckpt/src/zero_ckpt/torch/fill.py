"""Read checkpoint tensors into existing tensors, on any device, in any dtype, full or local parts."""

from __future__ import annotations

import torch

from ..errors import MismatchError
from ..manifest import TensorEntry
from ..reader import Checkpoint, ReadRequest
from .buffers import tensor_buffer, torch_dtype
from .dtensors import ContiguousRun, local_part

_STAGING_BYTES = 64 << 20


class Filler:
    """Fills tensors from `checkpoint`: `add` collects requests, and `run` reads them all at once with several reads in
    flight. Communicates nothing."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._direct: list[ReadRequest] = []
        self._staged: list[tuple[TensorEntry, torch.Tensor, list[ContiguousRun]]] = []

    def add(self, entry: TensorEntry, tensor: torch.Tensor, name: str) -> bool:
        """Request that `run` fills `tensor` with the values of the stored tensor `entry`. Returns whether their dtype
        will be converted.

        Of a DTensor the local part is filled. `name` is for errors. Raises MismatchError when the shapes differ, and
        CheckpointError for a placement that cannot be loaded.
        """
        if tuple(tensor.shape) != entry.shape:
            raise MismatchError(
                f"{name!r} has shape {tuple(tensor.shape)}, but {entry.name!r} ({entry.kind}) of the checkpoint "
                f"has {entry.shape}"
            )
        local, runs = local_part(tensor.detach(), name)
        same = torch_dtype(entry.dtype) == tensor.dtype
        if same and local.device.type == "cpu" and local.is_contiguous():
            view, size = tensor_buffer(local), local.element_size()
            for run in runs:
                out = view[run.local * size : (run.local + run.length) * size]
                self._direct.append(ReadRequest(entry.name, entry.kind, run.whole, out))
        else:
            self._staged.append((entry, local, runs))
        return not same

    def run(self) -> None:
        """Read the values of all tensors that were added; call it once. Raises DamagedError, or ReplacedError when the
        checkpoint's files are gone; some tensors may be filled by then."""
        self._checkpoint.read_many(self._direct)
        for entry, local, runs in self._staged:
            self._fill_staged(entry, local, runs)

    def _fill_staged(self, entry: TensorEntry, local: torch.Tensor, runs: list[ContiguousRun]) -> None:
        """Fill a tensor from the stored tensor `entry` through CPU memory of up to 64 MiB at a time, converting the
        dtype. Raises DamagedError or ReplacedError.

        `local` is this rank's part, on any device and with any strides; `runs` says where it lies in the full tensor.
        """
        flat = local.view(-1) if local.is_contiguous() else torch.empty(local.shape, dtype=local.dtype).view(-1)
        dtype = torch_dtype(entry.dtype)
        step = _STAGING_BYTES // dtype.itemsize
        for begin in range(0, sum(run.length for run in runs), step):
            part = flat[begin : begin + step]
            staging = torch.empty(part.numel(), dtype=dtype)
            view = tensor_buffer(staging)
            requests = []
            for run in runs:
                low, high = max(run.local, begin), min(run.local + run.length, begin + part.numel())
                if low < high:
                    out = view[(low - begin) * dtype.itemsize : (high - begin) * dtype.itemsize]
                    requests.append(ReadRequest(entry.name, entry.kind, run.whole + low - run.local, out))
            self._checkpoint.read_many(requests)
            part.copy_(staging)
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))


def read_tensor(checkpoint: Checkpoint, name: str, kind: str) -> torch.Tensor:
    """Return the stored tensor (`name`, `kind`) in full, in new CPU memory and in its stored dtype; `name` may be an
    alias.

    Raises NotFoundError, DamagedError and ReplacedError.
    """
    entry = checkpoint.entry(name, kind)
    tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
    checkpoint.read_into(name, kind, 0, tensor_buffer(tensor))
    return tensor
