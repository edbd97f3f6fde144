"""LAMB."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..steps import lamb_apply, lamb_step
from ._base import Bf16Weights, KernelOptimizer, check_range
from ._formats import Moment
from ._plan import Cohort, addresses

__all__ = ["CPULamb"]

_SCRATCH = 1 << 24  # elements of update directions in memory at once; more for a parameter that is larger


class CPULamb(KernelOptimizer):
    """LAMB (arXiv 1904.00962, algorithm 2, with the identity as scaling function). ``betas``, ``eps`` and
    ``bias_correction`` are Adam's; ``weight_decay`` times the weights is part of the direction; with ``maximize`` it
    ascends. The storage options (``state_dtype``, ``bf16_weights``, ``seed``, ``threads``) are those of `CPUAdam`.

    The trust ratio is per parameter. DTensors raise ``TypeError``: the norms of sharded parameters need a reduction
    over ranks, which a caller of `lamb_step` and `lamb_apply` can do in between.
    """

    moments = (Moment("exp_avg", second=False), Moment("exp_avg_sq", second=True))

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
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
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        super().__init__(
            params, defaults, state_dtype=state_dtype, bf16_weights=bf16_weights, seed=seed, threads=threads
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a negative rate, eps or decay, and for betas outside [0, 1)."""
        check_range("lr", group["lr"], 0.0)
        check_range("betas[0]", group["betas"][0], 0.0, 1.0)
        check_range("betas[1]", group["betas"][1], 0.0, 1.0)
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    def _check_param(self, group: int, position: int, param: torch.Tensor) -> None:
        """Raise ``TypeError`` or ``ValueError`` for a device, dtype or strides that are not supported, and
        ``TypeError`` for a DTensor.
        """
        super()._check_param(group, position, param)
        if hasattr(param, "to_local"):
            raise TypeError(f"{self._param_name(group, position)}: LAMB needs full parameters, got a DTensor")

    def _run(self, group: dict[str, Any], cohort: Cohort, grads: list[int], step: int, common: dict[str, Any]) -> None:
        """Update the cohort in place by `lamb_step` and `lamb_apply`, in batches whose directions fit one scratch
        buffer; arguments as in `KernelOptimizer._run`.
        """
        dtype = torch.float64 if cohort.param_dtype == "f64" else torch.float32
        scratch = torch.empty(min(sum(cohort.sizes), max(_SCRATCH, max(cohort.sizes, default=0))), dtype=dtype)
        offset = common["element_offset"]
        for batch in _batches(cohort.sizes, scratch.numel()):
            self._run_batch(group, cohort, grads, batch, scratch, {**common, "element_offset": offset})
            offset += sum(-(-size // 256) * 256 for size in cohort.sizes[batch])

    def _run_batch(
        self,
        group: dict[str, Any],
        cohort: Cohort,
        grads: list[int],
        batch: slice,
        scratch: torch.Tensor,
        common: dict[str, Any],
    ) -> None:
        """Update the cohort's parameters and states in ``batch``, a slice of its lists, in place.

        ``grads``: addresses of the whole cohort's gradients. ``scratch`` has room for the batch's update directions.
        ``common``: keyword arguments of both kernels, with the element offset of the batch.
        """
        sizes = cohort.sizes[batch]
        updates = addresses(torch.split(scratch[: sum(sizes)], sizes))
        own = {name: pointers[batch] for name, pointers in cohort.pointers.items()}
        common = {**common, "param_low": own.get("param_low")}
        norms = lamb_step(
            cohort.param_pointers[batch],
            grads[batch],
            own["exp_avg"],
            own["exp_avg_sq"],
            updates,
            sizes,
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=group["bias_correction"],
            grad_scale=-1.0 if group["maximize"] else 1.0,
            exp_avg_scale=own.get("exp_avg_scale"),
            exp_avg_sq_scale=own.get("exp_avg_sq_scale"),
            **common,
        )
        lr = float(group["lr"])
        ratios = [math.sqrt(weight / update) if weight > 0.0 and update > 0.0 else 1.0 for weight, update in norms]
        shared = {key: common[key] for key in ("step", "param_dtype", "param_low", "seed", "element_offset", "threads")}
        lamb_apply(cohort.param_pointers[batch], updates, sizes, steps=[(0, lr * ratio) for ratio in ratios], **shared)


def _batches(sizes: list[int], room: int) -> Iterator[slice]:
    """Yield consecutive slices of ``sizes`` (elements), each with a sum of at most ``room``; together they cover all.
    No size may exceed ``room``.
    """
    begin, held = 0, 0
    for index, size in enumerate(sizes):
        if held + size > room:
            yield slice(begin, index)
            begin, held = index, 0
        held += size
    if begin < len(sizes):
        yield slice(begin, len(sizes))
