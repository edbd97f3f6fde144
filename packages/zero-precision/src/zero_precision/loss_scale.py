"""Loss scales: none, static, and dynamic as DeepSpeed defines it. Plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from zero_precision.dtypes import PrecisionError


class LossScaleError(PrecisionError):
    """The dynamic loss scale overflowed at its minimum: the model diverged, or float16's range is too small for it."""


class LossScale(Protocol):
    """The calls that the engine makes of a loss scale.

    The loss is multiplied by `scale` before backward and the reduced gradient by `1 / scale` before clipping. After
    all ranks agreed whether any gradient is inf or NaN, `update(overflow)` is called once per optimizer step.
    """

    @property
    def scale(self) -> float: ...

    def update(self, overflow: bool) -> bool:
        """Record the outcome; return True when the optimizer step is to be taken, False when it is to be skipped."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NoLossScale:
    """The null loss scale: `scale` is 1.0 for ever, and a step is skipped exactly when its gradient is not finite."""

    scale = 1.0

    def update(self, overflow: bool) -> bool:
        """Return True when the step is to be taken: there was no overflow."""
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that says which loss scale this is."""
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept the state of any loss scale: there is nothing to restore."""


class StaticLossScale:
    """A constant loss scale; a step is skipped exactly when its gradient is not finite.

    Raises `PrecisionError` unless `scale` is a positive finite number.
    """

    def __init__(self, scale: float) -> None:
        self._scale = _positive("loss_scale", scale)

    @property
    def scale(self) -> float:
        """The constant that the loss is multiplied by."""
        return self._scale

    def update(self, overflow: bool) -> bool:
        """Return True when the step is to be taken: there was no overflow."""
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that says which loss scale this is."""
        return {"kind": "static", "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept the state of any loss scale; the configured constant stays."""


class DynamicLossScale:
    """A loss scale that halves after overflows and doubles after a clean window, as DeepSpeed defines it.

    With i counting the calls of `update` from 0, j the last call that overflowed (-1 before any) and h the hysteresis
    that is left (it starts at `hysteresis`):

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
        self._window = _at_least_one("loss_scale_window", loss_scale_window)
        self._hysteresis = _at_least_one("hysteresis", hysteresis)
        self._minimum = _positive("min_loss_scale", min_loss_scale)
        self._consecutive = bool(consecutive_hysteresis)
        self._scale = _initial_scale(initial_scale_power, self._minimum)
        self._calls = 0
        self._last_overflow = -1
        self._hysteresis_left = self._hysteresis

    @property
    def scale(self) -> float:
        """The number that the next loss is to be multiplied by."""
        return self._scale

    def update(self, overflow: bool) -> bool:
        """Record one step; return True when it is to be taken. Raises `LossScaleError` at the minimum scale."""
        if overflow:
            self._shrink()
            self._last_overflow = self._calls
        else:
            self._grow()
        self._calls += 1
        return not overflow

    def _shrink(self) -> None:
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
        if self._consecutive:
            self._hysteresis_left = self._hysteresis
        clean_before = self._calls - self._last_overflow - 1
        if clean_before > 0 and clean_before % self._window == 0:
            self._hysteresis_left = self._hysteresis
            self._scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters as plain data."""
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "calls": self._calls,
            "last_overflow": self._last_overflow,
            "hysteresis_left": self._hysteresis_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another dynamic loss scale was; the state of another kind leaves the configured start.

        The window, hysteresis and minimum are those of this object. Raises `PrecisionError` for a broken state.
        """
        if state.get("kind") != "dynamic":
            return
        missing = [key for key in ("scale", "calls", "last_overflow", "hysteresis_left") if key not in state]
        if missing:
            raise PrecisionError(f"loss scale state: expected the keys of state_dict(), missing {', '.join(missing)}")
        self._scale = max(_positive("scale", state["scale"]), self._minimum)
        self._calls = int(state["calls"])
        self._last_overflow = int(state["last_overflow"])
        self._hysteresis_left = min(_at_least_one("hysteresis_left", state["hysteresis_left"]), self._hysteresis)


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise PrecisionError(f"{name}: expected a positive finite number, got {value!r}")
    return float(value)


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PrecisionError(f"{name}: expected an integer of at least 1, got {value!r}")
    return value


def _initial_scale(power: int, minimum: float) -> float:
    if isinstance(power, bool) or not isinstance(power, int) or not 0 <= power <= 127:
        raise PrecisionError(f"initial_scale_power: expected an integer from 0 to 127, got {power!r}")
    if 2.0**power < minimum:
        raise PrecisionError(
            f"initial_scale_power: 2^{power} = {2.0**power:g} is below min_loss_scale = {minimum:g}; raise the power "
            "or lower the minimum"
        )
    return 2.0**power
