"""The result of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .device_norm import DeviceSquare


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    ``square``: sum of squares of the gradients over all ranks, a `DeviceSquare` while only the device knows it; then
    reading `norm` or `taken` waits for the device. ``scale``: the loss scale in the gradients. ``raised``: exception of
    a step post-hook of the user's on this rank, after the update.
    """

    square: float | DeviceSquare
    scale: float = 1.0
    raised: Exception | None = None

    @property
    def norm(self) -> float:
        """The global norm of the unscaled gradients before clipping; inf or NaN if it was not finite. Waits for the
        device while only that knows it."""
        return norm_of(self._value, self.scale)

    @property
    def taken(self) -> bool:
        """Return whether the weights were updated, not the step skipped; waits for the device while only that knows."""
        return math.isfinite(self._value)

    @property
    def skipped(self) -> bool:
        """Return whether the step was skipped. Never waits: False for every step whose norm was added up on the device,
        as such a step raises later instead if the norm was not finite."""
        return not isinstance(self.square, DeviceSquare) and not self.taken

    @property
    def _value(self) -> float:
        """The sum of squares; waits for the device while only that knows it."""
        return self.square.read() if isinstance(self.square, DeviceSquare) else self.square


def norm_of(square: float, scale: float) -> float:
    """Return the norm, without the loss ``scale``, of gradients whose squares have the sum ``square``; NaN if that is
    NaN."""
    return math.sqrt(square) / scale if square >= 0 else math.nan
