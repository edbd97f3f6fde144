"""The learning rate range test."""

from __future__ import annotations

import math
from typing import Any

from zero_core.schedules.base import ParamGroups, Rate, Schedule, natural, per_group


class LRRangeTest(Schedule):
    """Raise the learning rate without bound, to find where training diverges (Smith 2018, arXiv 1803.09820).

    At iteration i: `min_lr * (1 + step_rate * interval)` with `interval = (i + 1) / step_size`, rounded down when
    `lr_range_test_staircase`. `lr_range_test_min_lr`: one rate, or one per param group. `lr_range_test_step_size`:
    iterations per interval.
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
        self.step_size = natural("lr_range_test_step_size", lr_range_test_step_size, least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._last_lr = self._write(self.min_lr)

    def get_lr(self) -> list[Rate]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]
