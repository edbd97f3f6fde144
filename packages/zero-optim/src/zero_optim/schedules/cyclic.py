"""The one-cycle schedule, and the range test that finds its bounds."""

from __future__ import annotations

import logging
import math
from typing import Any

from .base import ParamGroups, Rate, Schedule, as_integer, per_group


class LRRangeTest(Schedule):
    """Raise the learning rate without bound, to find where training diverges (Smith 2018, arXiv 1803.09820).

    At iteration i: `min_lr * (1 + step_rate * interval)` with `interval = (i + 1) / step_size`, rounded down when
    `lr_range_test_staircase`. `lr_range_test_min_lr`: one rate, or one per param group. `lr_range_test_step_size`:
    iterations per interval. `lr_range_test_step_rate`: by what fraction of the minimum the rate rises per interval.
    `last_batch_iteration`: where to continue, as in `Schedule`. `optimizer`: the one whose param groups it writes.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = as_integer("lr_range_test_step_size", lr_range_test_step_size, least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._last_lr = self._write(self.min_lr)

    def get_lr(self) -> list[Rate]:
        """Return the learning rate of each param group at `last_batch_iteration`, by the class's formula."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]


logger = logging.getLogger(__name__)

BETA2 = 0.99
"""The second beta while momentum is cycled; as in DeepSpeed it replaces the optimizer's own."""


class Cycle:
    """A triangle wave: from 0 to 1 over `first` iterations, back to 0 over `second` (None: as many).

    A side whose stair count (`first_stairs`, `second_stairs`; None: as the first) is not 0 rises or falls in so many
    steps. Raises ValueError by the argument's name in the configuration.
    """

    def __init__(self, first: float, second: float | None, first_stairs: int, second_stairs: int | None) -> None:
        self.first = float(first)
        self.second = self.first if second is None else float(second)
        if not self.first > 0:
            raise ValueError(f"cycle_first_step_size: expected a number of iterations > 0, got {first!r}")
        if not self.second >= 0:
            raise ValueError(f"cycle_second_step_size: expected a number of iterations >= 0, got {second!r}")
        self.first_stairs = as_integer("cycle_first_stair_count", first_stairs, least=0)
        chosen = first_stairs if second_stairs is None else second_stairs
        self.second_stairs = as_integer("cycle_second_stair_count", chosen, least=0)
        self.total = self.first + self.second

    def height(self, iteration: int) -> float:
        """Return the wave's value at `iteration` (from 0): between 0 and 1. It repeats after `first + second`
        iterations.
        """
        rising = self.first / self.total
        turn = math.floor(1 + iteration / self.total)
        position = 1.0 + iteration / self.total - turn
        if position <= rising:
            stairs, height = self.first_stairs, position / rising
        else:
            stairs, height = self.second_stairs, (position - 1) / (rising - 1)
        return height if stairs == 0 else self._staircase(iteration, stairs)

    def _staircase(self, iteration: int, stairs: int) -> float:
        """Return the wave's value at `iteration` rounded down to a multiple of 1 / `stairs`.

        Computed from whole iterations, which are exact where a fraction of the cycle is not.
        """
        within = iteration % self.total
        if within <= self.first:
            return math.floor(within * stairs / self.first) / stairs
        return math.floor((self.total - within) * stairs / self.second) / stairs


class OneCycle(Schedule):
    """Cycle the learning rate up and down once, momentum the other way, then decay both (Smith 2018, arXiv 1803.09820).

    Iteration i is in the cycle while `i < first + second`: rates are `min + (max - min) * h` with h the height of the
    triangle at `i + 1`, in stairs where a stair count is not 0. After it, with `d = (i - first - second + 1) /
    decay_step_size`, rates are `min / (1 + decay_lr_rate * d)`; they stay at `min` when `decay_step_size` or
    `decay_lr_rate` is 0. With `cycle_momentum`, `betas` are `(max_mom - (max_mom - min_mom) * h, 0.99)` in the cycle,
    `(max_mom * (1 + decay_mom_rate * d), 0.99)` after it; param groups without `betas` are left alone.

    `cycle_min_lr`, `cycle_max_lr`, `cycle_min_mom` and `cycle_max_mom` are min, max, min_mom and max_mom, each one
    number or one per param group; `cycle_first_step_size` and `cycle_second_step_size` (None: as the first) are first
    and second, in iterations. `last_batch_iteration`: where to continue, as in `Schedule`. `get_last_lr` raises until
    the first `step`. `optimizer`: the one whose param groups it writes.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8,
        cycle_max_mom: Any = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.cycle = Cycle(
            cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count
        )
        self.first_step_size, self.second_step_size = self.cycle.first, self.cycle.second
        self.total_size, self.step_ratio = self.cycle.total, self.cycle.first / self.cycle.total
        self.first_stair_count, self.second_stair_count = self.cycle.first_stairs, self.cycle.second_stairs
        self.min_lrs = per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.cycle_momentum = cycle_momentum and self._has_momentum()
        if last_batch_iteration == -1:
            self._write(self.min_lrs)
            if self.cycle_momentum:
                self._write_momentum(self.min_moms)

    def get_lr(self) -> list[Rate]:
        """Return the learning rate of each param group at `last_batch_iteration`, by the class's formula."""
        if self.last_batch_iteration < self.cycle.total:
            height = self.cycle.height(self.last_batch_iteration + 1)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        if self.decay_step_size == 0 or self.decay_lr_rate == 0:
            return list(self.min_lrs)
        factor = 1 + self.decay_lr_rate * self._decay_intervals()
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group at `last_batch_iteration`, by the class's formula, also for groups
        without betas; None where momentum is not cycled.
        """
        return [(momentum, BETA2) for momentum in self._momenta()] if self.cycle_momentum else None

    def _momenta(self) -> list[float]:
        """Return the first beta of each param group at `last_batch_iteration`, also for groups without betas."""
        if self.last_batch_iteration < self.cycle.total:
            height = self.cycle.height(self.last_batch_iteration + 1)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        if self.decay_step_size == 0 or self.decay_mom_rate == 0:
            return list(self.max_moms)
        factor = 1 + self.decay_mom_rate * self._decay_intervals()
        return [high * factor for high in self.max_moms]

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to `batch_iteration`, and write its rates and betas to the param groups."""
        super().step(batch_iteration)
        if self.cycle_momentum:
            self._write_momentum(self._momenta())

    def _decay_intervals(self) -> float:
        """Return how many intervals of `decay_step_size` iterations have passed since the end of the cycle, a fraction
        included: `d` of the class's formula."""
        return (self.last_batch_iteration - self.cycle.total + 1) / self.decay_step_size

    def _has_momentum(self) -> bool:
        """Return whether any param group has betas, which the schedule can write; log a warning if none has."""
        found = any("betas" in group for group in self.optimizer.param_groups)
        if not found:
            logger.warning(
                "OneCycle: cycle_momentum has no effect, since no param group of %s has betas; only lr is cycled",
                type(self.optimizer).__name__,
            )
        return found

    def _write_momentum(self, momenta: list[float]) -> None:
        """Write (momentum, 0.99) as the betas of each param group that has some; ``momenta``: one per group."""
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            if "betas" in group:
                group["betas"] = (momentum, BETA2)
