"""Buffers of a module whose forward runs twice: which may change, which did, and how they get their values back.

Statistics are the buffers that training writes and does not read, those of batch and instance normalization.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS_OF_ONE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class WatchedBuffers:
    """Finds changes to the buffers of ``module`` since its own construction, which comes before a run of the module's
    forward. The module's `statistics` are left out.

    ``by_value``: keep copies of their values to compare with, as some kernels write without raising a tensor's version;
    comparing waits for the device.
    """

    def __init__(self, module: nn.Module, *, by_value: bool) -> None:
        left_out = {id(buffer) for buffer in statistics(module)}
        watched = [(name, b) for name, b in module.named_buffers() if id(b) not in left_out]
        self._module = module
        self._before = [(name, b, _version(b), b.clone() if by_value else None) for name, b in watched]

    def changed(self) -> str | None:
        """Return the name of a buffer that was written or replaced since construction; None if none was."""
        now = dict(self._module.named_buffers())
        for name, buffer, version, value in self._before:
            if now.get(name) is not buffer or _version(buffer) != version:
                return name
            if value is not None and not _is_same(buffer, value):
                return name
        return None


def statistics(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of ``module`` that training writes and does not read: those of batch and instance
    normalization layers in training mode."""
    norms = [m for m in module.modules() if isinstance(m, (*_NORMS, *_NORMS_OF_ONE)) and m.training]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Restore the values of the `statistics` of ``module`` after the block, also if the block raises."""
    before = [(buffer, buffer.clone()) for buffer in statistics(module)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _version(tensor: torch.Tensor) -> int:
    """Return the version counter of ``tensor``, which counts writes; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same values; NaN is equal to NaN."""
    return torch.equal(ours, theirs) or bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())
