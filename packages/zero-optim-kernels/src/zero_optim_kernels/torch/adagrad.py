"""Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..steps import adagrad_step
from ._base import Bf16Weights, KernelOptimizer, check_range
from ._formats import Moment
from ._plan import Cohort

__all__ = ["CPUAdagrad"]


class CPUAdagrad(KernelOptimizer):
    """Adagrad (JMLR 12, 2011, figure 1) with `torch.optim.Adagrad`'s options; the storage options (``state_dtype``,
    ``bf16_weights``, ``seed``, ``threads``) are those of `CPUAdam`.
    """

    elementwise = True
    moments = (Moment("sum", second=True),)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "float32",
        bf16_weights: Bf16Weights = "stochastic",
        seed: int = 0,
        threads: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": None,
            "maximize": maximize,
            "differentiable": False,
            "fused": None,
        }
        super().__init__(
            params, defaults, state_dtype=state_dtype, bf16_weights=bf16_weights, seed=seed, threads=threads
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group and create the accumulators of its parameters, as torch does. Raises ``TypeError`` or
        ``ValueError``, before anything is added, for options or parameters that are not supported."""
        super().add_param_group(param_group)
        self._ensure_states(self.param_groups[-1], self.param_groups[-1]["params"])

    def _initial_moment(self, group: dict[str, Any], moment: Moment) -> float:
        """Return the group's ``initial_accumulator_value``; the only moment is ``sum``."""
        return float(group["initial_accumulator_value"])

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` for an option that is negative."""
        for name in ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"):
            check_range(name, group[name], 0.0)

    def _run(self, group: dict[str, Any], cohort: Cohort, grads: list[int], step: int, common: dict[str, Any]) -> None:
        """Update the cohort in place by `adagrad_step`; arguments as in `KernelOptimizer._run`."""
        adagrad_step(
            cohort.param_pointers,
            grads,
            cohort.pointers["sum"],
            cohort.sizes,
            lr=float(group["lr"]),
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=-1.0 if group["maximize"] else 1.0,
            sum_sq_scale=cohort.pointers.get("sum_scale"),
            **common,
        )
