"""0/1 Adam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..base import AdamHyperparameters, adam_defaults
from .adam import OneBitOptimizer, adam_denominator, apply_adam, bias_corrections, check_positive

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (arXiv 2202.06009, algorithm 1 with the schedules of its section 6), with decoupled weight decay.

    Until ``var_freeze_step`` the variance is updated in some steps, with averaged gradients: at first in every step,
    then half as often after each ``var_update_scaler`` updates. In all other steps the ranks average their momenta, one
    bit per element. After ``var_freeze_step`` they average only at the end of an interval, whose length is one step at
    first, doubles every ``local_step_scaler`` steps and is at most ``local_step_clipper``; within an interval every
    rank steps locally, and the ranks' weights differ. `synchronise`, which a checkpoint calls, ends the interval.
    Raises ValueError for any of these four below 1. ``params``, ``lr``, ``adam``: as for Adam (`AdamHyperparameters`).
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
        check_positive(
            type(self),
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
        )
        super().__init__(params, adam_defaults(lr, **adam))
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self._local_steps: list[_LocalSteps] = []

    def variance_steps(self, number: int) -> int:
        """Return how many of the steps 1 to ``number`` update the variance, by the schedule of the class; steps after
        ``var_freeze_step`` never do."""
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
        """Return the scheduled length in steps of intervals at step ``number`` (from 1): one ends where the steps since
        ``var_freeze_step`` are a multiple of it. 1 means that the ranks average in every step.

        The first interval after a doubling may be shorter, the last one before it longer.
        """
        doublings = max(number - self.var_freeze_step - 1, 0) // self.local_step_scaler
        return min(self.local_step_clipper, 1 << min(doublings, 62))

    def synchronise(self) -> bool:
        """End the interval of local steps: average these over the ranks, so that the ranks' weights are equal. Return
        whether there were any local steps. Collective."""
        if not self._local_steps:
            return False
        self._average_interval(self.steps)
        return True

    def _uses_own_gradients(self, number: int) -> bool:
        """Return whether step ``number`` (from 1) uses this rank's own gradients: one that leaves the variance as it
        is.
        """
        return self.variance_steps(number) == self.variance_steps(number - 1)

    def _take_step(self, number: int, own: bool) -> None:
        """Take step ``number``, a step of Adam. If the gradients are averaged, the variance is updated too. If they are
        this rank's ``own``, the variance stays, and the ranks average their momenta: at once or, where intervals are
        longer than a step, at the end of the interval.

        Collective in steps in which the ranks average.
        """
        interval = self.interval(number)
        if own and interval > 1 and not self._local_steps:
            self._local_steps = [_LocalSteps(p) for _, p in self._parameters()]
        for group, p in self._parameters():
            if own or p.grad is not None:
                self._advance_moments(group, p, variance=not own)
        if own and not self._local_steps:
            self._average_over_ranks([self.state[p]["exp_avg"] for _, p in self._parameters()], number)
        for position, (group, p) in enumerate(self._parameters()):
            if own or p.grad is not None:
                first, second = bias_corrections(group, number, self.variance_steps(number))
                apply_adam(group, p, self.state[p], first, second)
                if self._local_steps:
                    self._local_steps[position].add(group, self.state[p]["exp_avg"], first)
        if self._local_steps and (number - self.var_freeze_step) % interval == 0:
            self._average_interval(number)

    @torch.no_grad()
    def _average_interval(self, number: int) -> None:
        """Undo the local steps since the interval began and take one step along the average of the ranks' momenta
        instead, at step ``number``. Collective.
        """
        local, self._local_steps = self._local_steps, []
        own = [self.state[p]["exp_avg"] for _, p in self._parameters()]
        momenta = [each.mean_momentum(momentum) for each, momentum in zip(local, own, strict=True)]
        self._average_over_ranks(momenta, number)
        for (group, p), each, momentum in zip(self._parameters(), local, momenta, strict=True):
            state = self.state[p]
            state["exp_avg"].copy_(momentum)
            _, second = bias_corrections(group, number, self.variance_steps(number))
            p.copy_(each.start).mul_(each.decay)
            p.addcdiv_(momentum, adam_denominator(group, state["exp_avg_sq"], second), value=-each.rate)


class _LocalSteps:
    """The local steps of one parameter in the current interval.

    ``start``: its weights before them; ``rate``: the sum of their learning rates, bias-corrected; ``decay``: the
    product of their weight decays' factors.
    """

    def __init__(self, p: torch.Tensor) -> None:
        self.start = p.detach().clone()
        self.rate = 0.0
        self.decay = 1.0
        self._moved = torch.zeros_like(self.start)

    def add(self, group: dict[str, Any], momentum: torch.Tensor, first: float) -> None:
        """Add a local step along ``momentum`` that the caller has taken. ``group`` has its learning rate and
        weight decay; ``first``, the bias correction of the first moment, divides the rate.
        """
        rate = group["lr"] / first
        self.rate += rate
        self.decay *= 1.0 - group["lr"] * group["weight_decay"]
        self._moved.add_(momentum, alpha=rate)

    def mean_momentum(self, present: torch.Tensor) -> torch.Tensor:
        """Return the mean of the steps' momenta, weighted by their learning rates, or a copy of ``present``, the last
        one, where these are all 0. Call it once: it scales in place."""
        return self._moved.div_(self.rate) if self.rate else present.clone()
