"""Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..steps import lion_step
from ._base import Bf16Weights, KernelOptimizer, check_range
from ._formats import Moment
from ._plan import Cohort

__all__ = ["CPULion"]


class CPULion(KernelOptimizer):
    """Lion (arXiv 2302.06675, algorithm 2). ``betas``: the weights of the moment in the step, and of its own update;
    ``weight_decay`` is decoupled; with ``maximize`` it ascends.

    The storage options (``state_dtype``, ``bf16_weights``, ``seed``, ``threads``) are those of `CPUAdam`.
    """

    elementwise = True
    moments = (Moment("exp_avg", second=False),)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "float32",
        bf16_weights: Bf16Weights = "stochastic",
        seed: int = 0,
        threads: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params, defaults, state_dtype=state_dtype, bf16_weights=bf16_weights, seed=seed, threads=threads
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a negative rate or decay, and for betas outside [0, 1)."""
        check_range("lr", group["lr"], 0.0)
        check_range("betas[0]", group["betas"][0], 0.0, 1.0)
        check_range("betas[1]", group["betas"][1], 0.0, 1.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    def _run(self, group: dict[str, Any], cohort: Cohort, grads: list[int], step: int, common: dict[str, Any]) -> None:
        """Update the cohort in place by `lion_step`; arguments as in `KernelOptimizer._run`."""
        lion_step(
            cohort.param_pointers,
            grads,
            cohort.pointers["exp_avg"],
            cohort.sizes,
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            weight_decay=group["weight_decay"],
            grad_scale=-1.0 if group["maximize"] else 1.0,
            exp_avg_scale=cohort.pointers.get("exp_avg_scale"),
            **common,
        )
