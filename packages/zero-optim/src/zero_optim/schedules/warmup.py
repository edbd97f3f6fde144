"""Warm up, then stay constant, decay linearly, or decay as a cosine."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from .base import ParamGroups, Rate, Schedule, as_integer, group_rates, per_group

logger = logging.getLogger(__name__)

WarmupType = Literal["log", "linear"]


class Ramp:
    """The rise from 0 to 1 over the first `steps` iterations (at least 2), with a shape of `kind` "log" or "linear".
    Any other kind is taken as "log", with a warning, as in DeepSpeed. Raises ValueError for fewer than 1 step."""

    def __init__(self, steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            logger.warning("warmup_type: expected 'log' or 'linear', got %r; 'log' is used", kind)
            kind = "log"
        self.steps = max(2, as_integer("warmup_num_steps", steps, least=1))
        self.kind = kind
        self._per_log = 1.0 / math.log(self.steps)

    def at(self, iteration: int) -> float:
        """Return the height at `iteration`, from 0 to `steps`: `log(iteration + 1) / log(steps)` or `iteration /
        steps`.
        """
        return self._per_log * math.log(iteration + 1) if self.kind == "log" else iteration / self.steps


class WarmupLR(Schedule):
    """Rise from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` iterations, then stay.

    At iteration i: `min + (max - min) * gamma` with gamma, by `warmup_type`, `log(i + 1) / log(n)` ("log") or `i / n`
    ("linear") below `n = max(2, warmup_num_steps)` and 1 from there on; before the first `step` the rate is `min`. Both
    bounds are one rate or one per param group; a `warmup_max_lr` of None is the rate that each group has now.
    `last_batch_iteration`: where to continue, as in `Schedule`. `optimizer`: the one whose param groups it writes.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        largest = group_rates(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = per_group(optimizer, "warmup_max_lr", largest)
        self.ramp = Ramp(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self.ramp.steps, self.ramp.kind
        if last_batch_iteration == -1:
            self._last_lr = self._write(self.min_lrs)

    def get_lr(self) -> list[Rate]:
        """Return the learning rate of each param group at `last_batch_iteration`, by the class's formula."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        warming = self.last_batch_iteration < self.ramp.steps
        gamma = (
            self.ramp.at(self.last_batch_iteration) if warming else self._gamma_after_warmup(self.last_batch_iteration)
        )
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma_after_warmup(self, iteration: int) -> float:
        """Return gamma (1 for the maximal rate, 0 for the minimal one) at an iteration after the warm-up: always 1
        here; subclasses let it fall."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rise as `WarmupLR` does, then fall linearly to `warmup_min_lr` at iteration `total_num_steps`.

    After the warm-up of n iterations gamma is `max(0, (total - i) / max(1, total - n))`. The other arguments are those
    of `WarmupLR`. A total below the warm-up is logged as a warning. `optimizer`: the one whose param groups it writes.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = as_integer("total_num_steps", total_num_steps, least=1)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_when_short(self.total_num_steps, self.ramp.steps)

    def _gamma_after_warmup(self, iteration: int) -> float:
        """Return gamma at an iteration after the warm-up: 1 to 0, falling linearly, and 0 from `total_num_steps` on."""
        falling = float(max(1.0, self.total_num_steps - self.ramp.steps))
        return max(0.0, float(self.total_num_steps - iteration) / falling)


class WarmupCosineLR(Schedule):
    """Scale the rate that each param group has now: up over `warmup_num_steps` iterations, then down as a cosine.

    At iteration i the ratio is `warmup_min_ratio + (1 - warmup_min_ratio) * gamma` below `n = max(2,
    warmup_num_steps)`, gamma by `warmup_type` as in `WarmupLR`. From there it is `cos_min_ratio + (1 - cos_min_ratio) *
    (1 + cos(pi * t)) / 2` with `t = min(1, (i - n + 1) / max(1, total_num_steps - n))`. Before the first `step` the
    rate is 0. `last_batch_iteration`: where to continue, as in `Schedule`. `optimizer`: the one whose param groups it
    writes.
    """

    def __init__(
        self,
        optimizer: ParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = as_integer("total_num_steps", total_num_steps, least=1)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.ramp = Ramp(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self.ramp.steps, self.ramp.kind
        self.org_lrs = group_rates(optimizer)
        _warn_when_short(self.total_num_steps, self.ramp.steps)
        if last_batch_iteration == -1:
            self._last_lr = self._write(self.get_lr())

    def get_lr_ratio(self) -> float:
        """Return the factor by which the original rates are multiplied at `last_batch_iteration`; 0 before the first
        `step`.
        """
        iteration, steps = self.last_batch_iteration, self.ramp.steps
        if iteration < 0:
            return 0.0
        if iteration < steps:
            return self.warmup_min_ratio + self.ramp.at(iteration) * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[Rate]:
        """Return the learning rate of each param group at `last_batch_iteration`: the original rates times
        `get_lr_ratio`.
        """
        if self.last_batch_iteration < 0:
            return [0.0] * len(self.org_lrs)
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


def _warn_when_short(total: int, warmup: int) -> None:
    """Log a warning if the schedule's ``total`` number of steps is smaller than that of its ``warmup``."""
    if total < warmup:
        logger.warning("total_num_steps %d is less than warmup_num_steps %d: the warm-up never ends", total, warmup)
