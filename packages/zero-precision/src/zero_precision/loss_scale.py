"""Loss scales: none, static, and dynamic as DeepSpeed defines it. Plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from zero_precision.names import PrecisionError


class LossScaleError(PrecisionError):
    """The dynamic loss scale overflowed at its minimum: the model diverged, or float16's range is too small for it."""


class LossScale(Protocol):
    """A loss scale, as the engine uses it.

    The loss is multiplied by `scale` before backward and the reduced gradient by `1 / scale` before clipping. After
    all ranks agreed whether any gradient is inf or NaN, `update(overflow)` is called once per optimizer step.
    """

    @property
    def scale(self) -> float:
        """Return the factor by which the next loss is multiplied."""

    def update(self, overflow: bool) -> bool:
        """Adapt the scale to the outcome of a step, and return whether the optimizer is to take the step.

        ``overflow``: a gradient on any rank is inf or NaN; the same on all ranks. Raises `LossScaleError` when the
        scale cannot fall any more.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data for a checkpoint; ``kind`` names the class of loss scale."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, which `state_dict` returned; do nothing if it is that of another class of loss scale."""


class NoLossScale:
    """No loss scale: `scale` is always 1.0, and a step is skipped if and only if its gradient is not finite."""

    scale = 1.0

    def update(self, overflow: bool) -> bool:
        """Return whether the optimizer is to take the step: not after an overflow (a gradient that is inf or NaN)."""
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint: the kind of this loss scale."""
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state to restore."""


class StaticLossScale:
    """A constant loss scale; a step is skipped if and only if its gradient is not finite.

    Raises `PrecisionError` unless `scale` is a positive finite number.
    """

    def __init__(self, scale: float) -> None:
        self._scale = _positive_float("loss_scale", scale)

    @property
    def scale(self) -> float:
        """Return the factor by which losses are multiplied, which is constant."""
        return self._scale

    def update(self, overflow: bool) -> bool:
        """Return whether the optimizer is to take the step: not after an overflow (a gradient that is inf or NaN). The
        scale stays.
        """
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint: the kind of this loss scale, and the constant."""
        return {"kind": "static", "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the configured constant stays."""


class DynamicLossScale:
    """A loss scale that halves after overflows and doubles after a clean window, as DeepSpeed defines it.

    Let i be the number of this call of `update` (from 0), j that of the last call with an overflow (-1 before any), and
    h the hysteresis that is left (at first `hysteresis`):

    - overflow: if h > 1, h becomes h - 1 and the scale stays; else scale = max(scale / 2, min_loss_scale). An overflow
      with h = 1 while the scale is at the minimum raises `LossScaleError`. Then j = i. The step is skipped.
    - no overflow: with n = i - j - 1 clean calls before this one, if n > 0 and n is a multiple of `loss_scale_window`,
      the scale doubles and h is refilled. With `consecutive_hysteresis` h is refilled by every clean call instead.

    `initial_scale_power` is the power of two that the scale starts at. All ranks must pass the same `overflow`.
    Raises `PrecisionError` when an argument is out of range.
    """

    def __init__(
        self,
        *,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        self._window = _positive_int("loss_scale_window", loss_scale_window)
        self._hysteresis = _positive_int("hysteresis", hysteresis)
        self._minimum = _positive_float("min_loss_scale", min_loss_scale)
        self._consecutive = bool(consecutive_hysteresis)
        self._scale = _checked_initial_scale(initial_scale_power, self._minimum)
        self._calls = 0
        self._last_overflow = -1
        self._hysteresis_left = self._hysteresis

    @property
    def scale(self) -> float:
        """Return the factor by which the next loss is multiplied."""
        return self._scale

    def update(self, overflow: bool) -> bool:
        """Adapt the scale to the outcome of a step; return whether the optimizer is to take the step: not after an
        overflow.

        Raises `LossScaleError` for an overflow at the minimum scale, once the hysteresis is used up.
        """
        if overflow:
            self._shrink()
            self._last_overflow = self._calls
        else:
            self._grow()
        self._calls += 1
        return not overflow

    def _shrink(self) -> None:
        """Respond to an overflow: use up one unit of hysteresis, or, if one is left, halve the scale, not below the
        minimum. Raises `LossScaleError` if the scale is then at the minimum already."""
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
            return
        if self._scale == self._minimum:
            raise LossScaleError(
                f"gradients overflowed in step {self._calls} with the loss scale at its minimum "
                f"(fp16.min_loss_scale = {self._minimum:g}), after overflow in step {self._last_overflow}: the model "
                "diverged, or its gradients do not fit float16. Lower the learning rate or clip gradients, look for "
                "the first NaN in the loss, or train in bf16, whose range needs no loss scale"
            )
        self._scale = max(self._scale / 2.0, self._minimum)

    def _grow(self) -> None:
        """Respond to a call without an overflow: double the scale and refill the hysteresis if the clean calls before
        fill a whole number of windows. With `consecutive_hysteresis` refill it in any case."""
        if self._consecutive:
            self._hysteresis_left = self._hysteresis
        clean_before = self._calls - self._last_overflow - 1
        if clean_before > 0 and clean_before % self._window == 0:
            self._hysteresis_left = self._hysteresis
            self._scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return ``kind``, ``scale`` and the counters ``calls``, ``last_overflow`` and ``hysteresis_left``, as plain
        data for a checkpoint.
        """
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "calls": self._calls,
            "last_overflow": self._last_overflow,
            "hysteresis_left": self._hysteresis_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scale and counters of ``state``, which `state_dict` returned; do nothing if it is that of another
        class of loss scale.

        The window, hysteresis and minimum of this object stay, and limit what is loaded. Raises `PrecisionError` for
        missing keys or bad values."""
        if state.get("kind") != "dynamic":
            return
        missing = [key for key in ("scale", "calls", "last_overflow", "hysteresis_left") if key not in state]
        if missing:
            raise PrecisionError(f"loss scale state: expected the keys of state_dict(), missing {', '.join(missing)}")
        self._scale = max(_positive_float("scale", state["scale"]), self._minimum)
        self._calls = int(state["calls"])
        self._last_overflow = int(state["last_overflow"])
        self._hysteresis_left = min(_positive_int("hysteresis_left", state["hysteresis_left"]), self._hysteresis)


def _positive_float(name: str, value: float) -> float:
    """Return ``value`` as a float. Raises `PrecisionError` unless it is positive and finite; ``name``: the argument's,
    for the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise PrecisionError(f"{name}: expected a positive finite number, got {value!r}")
    return float(value)


def _positive_int(name: str, value: int) -> int:
    """Return ``value``. Raises `PrecisionError` unless it is an int of at least 1; ``name``: the argument's, for the
    message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PrecisionError(f"{name}: expected an integer of at least 1, got {value!r}")
    return value


def _checked_initial_scale(power: int, minimum: float) -> float:
    """Return 2**power. Raises `PrecisionError` unless ``power`` is 0 to 127 and the result at least ``minimum``."""
    if isinstance(power, bool) or not isinstance(power, int) or not 0 <= power <= 127:
        raise PrecisionError(f"initial_scale_power: expected an integer from 0 to 127, got {power!r}")
    if 2.0**power < minimum:
        raise PrecisionError(
            f"initial_scale_power: 2^{power} = {2.0**power:g} is below min_loss_scale = {minimum:g}; raise the power "
            "or lower the minimum"
        )
    return 2.0**power
