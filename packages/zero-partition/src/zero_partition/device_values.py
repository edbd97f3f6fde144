"""Small values of an accelerator on their way to the host, and sums of squares that are added there."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """A copy of ``values``, a small tensor of an accelerator, on its way to the host behind the work that is queued
    now."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host = _pinned(values)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.Event(values.device)
        self._event.record()

    @property
    def is_here(self) -> bool:
        """True if `read` returns without waiting for the device."""
        return self._event.query()

    def read(self) -> list[float]:
        """Return the values as a list; wait for the device if they have not arrived on the host."""
        if not self.is_here:
            self._event.synchronize()
        return self._host.tolist()


def squares_on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each of ``tensors`` (at least one, all on one device) as a 1-D tensor there, of
    `sum_dtype`. The host does not wait."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, sum_dtype(tensors[0].device))).square_()


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums of squares on ``device``: float64, or float32 on MPS, which lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """Return uninitialised host memory of the shape and dtype of ``values``, pinned where the accelerator can."""
    try:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    except RuntimeError:  # the copy then waits for the device
        return torch.empty(values.shape, dtype=values.dtype)
