"""The norm of a step's gradients on an accelerator: added there, and read by the host once it has come over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero_comm import Tag

from .device_values import HostCopy, squares_on_device, sum_dtype
from .partition import Partition
from .placeholder import Placeholders, any_written


class DeviceSquare:
    """The global sum of squares of a step's gradients, on an accelerator and on its way to the host.

    ``total``: 0-D; not finite also where code wrote into a released parameter. ``by_unit``: 1-D, this rank's sum for
    each of ``units`` (names); without gradients, one 0 for the name "".

    Attributes:
        step: number of the step.
        found_inf: 1.0 on the device if the sum is not finite, else 0.0 (float32, 0-D), as torch's fused optimizers take
            it.
    """

    def __init__(self, step: int, total: torch.Tensor, by_unit: torch.Tensor, units: Sequence[str]) -> None:
        self.step = step
        self.found_inf = torch.isfinite(total).logical_not_().float()
        self._total = total
        self._by_unit = by_unit
        self._units = units
        self._arriving: HostCopy | None = HostCopy(total.view(1))
        self._value = math.nan

    @property
    def is_here(self) -> bool:
        """True if `read` returns without waiting for the device."""
        return self._arriving is None or self._arriving.is_here

    def read(self) -> float:
        """Return the sum; wait for the device if it has not arrived on the host."""
        if self._arriving is not None:
            self.settle(self._arriving.read()[0])
        return self._value

    def settle(self, value: float) -> None:
        """Set the sum to ``value``, which another rank has read, so that `read` does not wait for the device."""
        self._arriving, self._value = None, value

    def factor(self, clip: float, epsilon: float, scale: float) -> torch.Tensor:
        """Return the 0-D factor, on the device, to multiply gradients with: it removes the loss ``scale`` from them and
        clips their norm to ``clip``. It is 1 / scale where the norm is smaller.

        ``epsilon``: added to the norm before the division. The host does not wait.
        """
        norm = self._total.sqrt().div_(scale).add_(epsilon)
        return torch.full_like(norm, clip).div_(norm).clamp_(max=1.0).mul_(1.0 / scale)

    def first_unit(self) -> str:
        """Return the name of the first unit whose gradients on this rank are not all finite; "" for none. Waits for the
        device."""
        squares = zip(self._units, self._by_unit.tolist(), strict=True)
        return next((name for name, square in squares if not math.isfinite(square)), "")


class DeviceNorm:
    """Adds up the squares of a step's gradients on an accelerator and over the ranks; the host waits for nothing.

    Every rank's shard is added by itself, in float64 (float32 on MPS, which lacks it), then the ranks' sums, in the
    same way at every stage. ``partition``: whose gradients these are.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._placeholders: list[Placeholders] = [p for unit in partition.units for p in unit.placeholders]
        self._memory = [values for placeholders in self._placeholders for values in placeholders.tensors()]

    def square(self) -> DeviceSquare:
        """Return the sum of squares of all averaged gradients over all ranks, on its way to the host; it is not finite
        if code wrote into a released parameter. Collective, except at stage 0, where every rank has all gradients."""
        partition, step = self._partition, self._partition.runtime.step
        reduced = [g for g in partition.runtime.gradients.values() if g.is_reduced and g.reduced is not None]
        names = [gradients.unit.name for gradients in reduced] or [""]
        flats = [gradients.reduced for gradients in reduced if gradients.reduced is not None]
        if partition.options.stage == 0:
            chunks = [flat.chunk(partition.world_size) for flat in flats]
            squares = [self._squares([each[rank] for each in chunks]) for rank in range(partition.world_size)]
            total = torch.stack([one.sum() for one in squares]).sum()
            return DeviceSquare(step, total, torch.stack(squares).sum(0), names)
        mine = self._squares(flats)
        own = mine.sum()
        if self._memory:
            own = own.masked_fill_(any_written(self._memory), math.nan)
        everyones = own.new_empty(partition.world_size)
        partition.groups.gather.all_gather(everyones, own.view(1), Tag("control", "norm", step)).wait()
        return DeviceSquare(step, everyones.sum(), mine, names)

    def refuse_written(self) -> None:
        """Raise `ReleasedParameterError`, which names the parameter, if code wrote into a released parameter. Waits for
        the device."""
        for placeholders in self._placeholders:
            placeholders.verify_values()

    def _squares(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of squares of each of ``shards`` (1-D tensors) as a 1-D tensor on the device; a single 0 if
        there are none."""
        if not shards:
            return torch.zeros(1, dtype=sum_dtype(self._partition.device), device=self._partition.device)
        return squares_on_device(shards)
