"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..steps import adam_step
from ._base import Bf16Weights, KernelOptimizer, check_range
from ._formats import Moment
from ._plan import Cohort

__all__ = ["CPUAdam", "CPUAdamW"]


class CPUAdam(KernelOptimizer):
    """Adam (arXiv 1412.6980, algorithm 1) with `torch.optim.Adam`'s options except ``amsgrad``;
    ``decoupled_weight_decay`` makes it AdamW.

    How state is stored: ``state_dtype`` is ``"float32"``, ``"bfloat16"`` or ``"int8"`` (2.03 bytes per parameter).
    ``bf16_weights`` says how bfloat16 parameters are updated: with ``"stochastic"`` rounding, or ``"exact"`` with 16
    more bits in the state. ``seed``: of the rounding. ``threads``: of a step; 0 uses ``torch.get_num_threads()``.
    """

    elementwise = True
    moments = (Moment("exp_avg", second=False), Moment("exp_avg_sq", second=True))

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        state_dtype: str | torch.dtype = "float32",
        bf16_weights: Bf16Weights = "stochastic",
        seed: int = 0,
        threads: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(
            params, defaults, state_dtype=state_dtype, bf16_weights=bf16_weights, seed=seed, threads=threads
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled optimizer, or a loaded state; groups of an older one get the options they lack."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])
            group.setdefault("maximize", False)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a negative rate, eps or decay, for betas outside [0, 1), and for ``amsgrad``."""
        check_range("lr", group["lr"], 0.0)
        check_range("betas[0]", group["betas"][0], 0.0, 1.0)
        check_range("betas[1]", group["betas"][1], 0.0, 1.0)
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)
        if group.get("amsgrad"):
            raise ValueError("amsgrad is not supported; use torch.optim.Adam(amsgrad=True) for it")

    def _run(self, group: dict[str, Any], cohort: Cohort, grads: list[int], step: int, common: dict[str, Any]) -> None:
        """Update the cohort in place by `adam_step`; arguments as in `KernelOptimizer._run`."""
        own = cohort.pointers
        adam_step(
            cohort.param_pointers,
            grads,
            own["exp_avg"],
            own["exp_avg_sq"],
            cohort.sizes,
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            adamw_mode=group["decoupled_weight_decay"],
            grad_scale=-1.0 if group["maximize"] else 1.0,
            exp_avg_scale=own.get("exp_avg_scale"),
            exp_avg_sq_scale=own.get("exp_avg_sq_scale"),
            **common,
        )


class CPUAdamW(CPUAdam):
    """AdamW (arXiv 1711.05101, algorithm 2) with `torch.optim.AdamW`'s options except ``amsgrad``; the storage options
    (``state_dtype``, ``bf16_weights``, ``seed``, ``threads``) are those of `CPUAdam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        state_dtype: str | torch.dtype = "float32",
        bf16_weights: Bf16Weights = "stochastic",
        seed: int = 0,
        threads: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decoupled_weight_decay=True,
            state_dtype=state_dtype,
            bf16_weights=bf16_weights,
            seed=seed,
            threads=threads,
        )
