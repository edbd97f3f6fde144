"""The result of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .device_norm import DeviceSquare


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step.

    ``square``: sum of squares of the gradients over all ranks, a `DeviceSquare` if it was added up on the device, which
    the host has not read yet; then reading `norm` or `taken` waits for the device. ``scale``: the loss scale in the
    gradients. ``raised``: exception of the user's step post-hook on this rank, after the update.
    """

    square: float | DeviceSquare
    scale: float = 1.0
    raised: Exception | None = None

    @property
    def norm(self) -> float:
        """The global norm of the unscaled gradients before clipping; inf or NaN if it was not finite. May wait for the
        device."""
        return norm_of(self._value, self.scale)

    @property
    def taken(self) -> bool:
        """True if the weights were updated; False if the step was skipped, as the norm was not finite. May wait for the
        device."""
        return math.isfinite(self._value)

    @property
    def skipped(self) -> bool:
        """True if the step was skipped. Never waits: False for every step whose norm was added up on the device, as
        such a step raises later instead if the norm was not finite."""
        return not isinstance(self.square, DeviceSquare) and not self.taken

    @property
    def _value(self) -> float:
        """The sum of squares as a number. May wait for the device."""
        return self.square.read() if isinstance(self.square, DeviceSquare) else self.square


def norm_of(square: float, scale: float) -> float:
    """Return the global norm of the unscaled gradients; NaN if ``square`` is NaN.

    ``square``: the sum of squares of the gradients with the loss scale ``scale`` in them.
    """
    return math.sqrt(square) / scale if square >= 0 else math.nan
