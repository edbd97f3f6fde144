"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..steps import sgd_step
from ._base import Bf16Weights, KernelOptimizer, check_range
from ._formats import Moment
from ._plan import Cohort

__all__ = ["CPUSGD"]

_MOMENTUM = (Moment("momentum_buffer", second=False),)


class CPUSGD(KernelOptimizer):
    """Stochastic gradient descent with `torch.optim.SGD`'s options; the storage options (``state_dtype``,
    ``bf16_weights``, ``seed``, ``threads``) are those of `CPUAdam`.
    """

    elementwise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "float32",
        bf16_weights: Bf16Weights = "stochastic",
        seed: int = 0,
        threads: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }
        super().__init__(
            params, defaults, state_dtype=state_dtype, bf16_weights=bf16_weights, seed=seed, threads=threads
        )

    def _group_moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """Return the momentum buffer, or no moment for a group without momentum."""
        return _MOMENTUM if group["momentum"] != 0 else ()

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a negative rate, momentum or decay, and for ``nesterov`` without momentum or with
        dampening.
        """
        for name in ("lr", "momentum", "weight_decay"):
            check_range(name, group[name], 0.0)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov: needs momentum > 0 and dampening = 0, got {group['momentum']} and {group['dampening']}"
            )

    def _run(self, group: dict[str, Any], cohort: Cohort, grads: list[int], step: int, common: dict[str, Any]) -> None:
        """Update the cohort in place by `sgd_step`; arguments as in `KernelOptimizer._run`."""
        sgd_step(
            cohort.param_pointers,
            grads,
            cohort.pointers.get("momentum_buffer"),
            cohort.sizes,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            first=cohort.first,
            grad_scale=-1.0 if group["maximize"] else 1.0,
            momentum_buffer_scale=cohort.pointers.get("momentum_buffer_scale"),
            **common,
        )
