"""0/1 Adam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..base import AdamHyperparameters, adam_defaults
from .adam import OneBitOptimizer, adam_step, corrections, denominator

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (arXiv 2202.06009, algorithm 1 with the schedules of its section 6), with decoupled weight decay.

    Until ``var_freeze_step`` the variance is updated now and then, with averaged gradients: at every step first, and at
    half as many after each ``var_update_scaler`` updates. At all other steps the ranks average their momenta, one bit
    per element. After ``var_freeze_step`` they do that only at the end of an interval, which begins at one step,
    doubles every ``local_step_scaler`` steps and ends at ``local_step_clipper``; in between every rank moves on alone.

    So between such averages the ranks' weights differ. `synchronise`, which a checkpoint calls, ends the interval.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        **adam: Unpack[AdamHyperparameters],
    ) -> None:
        super().__init__(params, adam_defaults(lr, **adam))
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self._alone: list[_Alone] = []

    def variance_steps(self, number: int) -> int:
        """How many of the first ``number`` steps update the variance."""
        number, count, last, interval = min(number, self.var_freeze_step), 0, 0, 1
        while True:
            first = last - last % interval + interval
            if first > number:
                return count
            here = min(self.var_update_scaler, (number - first) // interval + 1)
            count, last, interval = count + here, first + (here - 1) * interval, interval * 2
            if here < self.var_update_scaler:
                return count

    def interval(self, number: int) -> int:
        """Steps from one average to the next at step ``number``."""
        doublings = max(number - self.var_freeze_step - 1, 0) // self.local_step_scaler
        return min(self.local_step_clipper, 1 << min(doublings, 62))

    def synchronise(self) -> bool:
        """Average what the ranks did alone; whether there was anything. Collective."""
        if not self._alone:
            return False
        self._come_together(self.steps)
        return True

    def _on_own(self, number: int) -> bool:
        return self.variance_steps(number) == self.variance_steps(number - 1)

    def _take_step(self, number: int, own: bool) -> None:
        interval = self.interval(number)
        if own and interval > 1 and not self._alone:
            self._alone = [_Alone(p) for _, p in self._parameters()]
        for group, p in self._parameters():
            if own or p.grad is not None:
                self._advance_moments(group, p, variance=not own)
        if own and not self._alone:
            self._average([self.state[p]["exp_avg"] for _, p in self._parameters()], number)
        for position, (group, p) in enumerate(self._parameters()):
            if own or p.grad is not None:
                first, second = corrections(group, number, self.variance_steps(number))
                adam_step(group, p, self.state[p], first, second)
                if self._alone:
                    self._alone[position].note(group, self.state[p]["exp_avg"], first)
        if self._alone and (number - self.var_freeze_step) % interval == 0:
            self._come_together(number)

    @torch.no_grad()
    def _come_together(self, number: int) -> None:
        """Go back to where the interval began, and from there along the average of the ranks' momenta."""
        alone, self._alone = self._alone, []
        momenta = [each.mean_momentum() for each in alone]
        self._average(momenta, number)
        for (group, p), each, momentum in zip(self._parameters(), alone, momenta, strict=True):
            state = self.state[p]
            state["exp_avg"].copy_(momentum)
            _, second = corrections(group, number, self.variance_steps(number))
            p.copy_(each.start).mul_(each.decay)
            p.addcdiv_(momentum, denominator(group, state["exp_avg_sq"], second), value=-each.rate)


class _Alone:
    """The steps of one parameter since the ranks were last together."""

    def __init__(self, p: torch.Tensor) -> None:
        self.start = p.detach().clone()
        self.rate = 0.0
        self.decay = 1.0
        self._moved = torch.zeros_like(self.start)

    def note(self, group: dict[str, Any], momentum: torch.Tensor, first: float) -> None:
        """A step was taken along ``momentum``."""
        rate = group["lr"] / first
        self.rate += rate
        self.decay *= 1.0 - group["lr"] * group["weight_decay"]
        self._moved.add_(momentum, alpha=rate)

    def mean_momentum(self) -> torch.Tensor:
        """The momenta of the steps, each as much as its learning rate."""
        return self._moved.div_(self.rate) if self.rate else self._moved
