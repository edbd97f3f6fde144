"""Steps whose optimizer leaves weights and states alone by itself, on the device, where a gradient is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from .device_norm import DeviceSquare
from .optimizer_tensors import OptimizerTensors
from .updates import FragmentUpdate, Touched, Update


class DeviceGuard:
    """Tells whether an optimizer's own kernels skip a step by a flag on the device, and gives them the flag.

    torch's fused optimizers do, by the attribute that `torch.amp.GradScaler` sets. Others step only once the host knows
    that the gradients are finite. ``tensors``: know whether the user has step hooks. ``update``: runs the optimizer;
    only where that updates fragments in place can a step be skipped. ``device``: where it steps.
    """

    def __init__(self, optimizer: Optimizer, tensors: OptimizerTensors, update: Update, device: torch.device) -> None:
        torchs = type(optimizer).__module__.startswith("torch.optim.")
        is_able = torchs and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._is_able = bool(is_able) and isinstance(update, FragmentUpdate) and device.type != "cpu"
        self._optimizer: Any = optimizer
        self._tensors = tensors
        self._stepped: dict[int, list[bool]] = {}

    @property
    def is_able(self) -> bool:
        """True if the next step can be skipped on the device, as far as this rank knows: the optimizer's kernels take
        the flag, no step hook of the user's looks at the step, and all param groups are fused."""
        hooked = self._tensors.is_hooked or self._tensors.is_hooked_after
        return self._is_able and not hooked and all(group.get("fused") for group in self._optimizer.param_groups)

    def covers(self, touched: Touched) -> bool:
        """Return whether all parameters that ``touched`` marks (by unit index, a flag per parameter) have states, as
        far as `note_step` has recorded since the last `forget`: a kernel that skips its step makes none."""
        return all(
            index in self._stepped and not any(t and not s for t, s in zip(flags, self._stepped[index], strict=True))
            for index, flags in touched.items()
        )

    def note_step(self, touched: Touched) -> None:
        """Record that the parameters that ``touched`` marks (by unit index, a flag per parameter) have states now. Do
        nothing for an optimizer whose steps cannot be skipped on the device."""
        for index, flags in touched.items() if self._is_able else ():
            known: Sequence[bool] = self._stepped.get(index, [False] * len(flags))
            self._stepped[index] = [t or s for t, s in zip(flags, known, strict=True)]

    def forget(self) -> None:
        """Record that states may have been removed, so that `covers` is False until another `note_step`."""
        self._stepped.clear()

    @contextmanager
    def skipping(self, square: DeviceSquare | None) -> Iterator[None]:
        """Have a step of the optimizer inside the block leave weights and states alone if the sum of squares of its
        gradients, ``square``, is not finite; the device decides. With None every step updates."""
        if square is None:
            yield
            return
        self._optimizer.grad_scale, self._optimizer.found_inf = None, square.found_inf
        try:
            yield
        finally:
            del self._optimizer.grad_scale, self._optimizer.found_inf
