"""LAMB over fragments of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from zero_optim_kernels import lamb_apply, lamb_step

from .base import AdamHyperparameters, ClosureOptimizer, adam_defaults

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DTYPES: dict[torch.dtype, Literal["f32", "f64"]] = {torch.float32: "f32", torch.float64: "f64"}


PartialNorms = Sequence[tuple[torch.Tensor, tuple[float, ...]]]
"""For each of the optimizer's tensors, the squared norms (weight, direction) of its elements."""


class ReduceNorms(Protocol):
    """Adds up partial norms over all parts of each parameter."""

    def __call__(self, partial: PartialNorms, /) -> list[tuple[float, ...]]:
        """Return the norms of full parameters in the order of ``partial``. Collective where there are ranks."""


class Lamb(ClosureOptimizer):
    """LAMB (arXiv 1904.00962, algorithm 2) on any device, in two halves with the norms of whole parameters in between.

    ``reduce_norms`` turns the squared norms (weight, direction) of what this process has of each parameter into those
    of the whole parameters; on its own an optimizer has all of them. The ratio of the norms is kept between
    ``min_coeff`` and ``max_coeff``; it is 1 where either norm is 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        **adam: Unpack[AdamHyperparameters],
    ) -> None:
        self.reduce_norms: ReduceNorms = _norms_of_one_process
        super().__init__(params, {**adam_defaults(lr, **adam), "max_coeff": max_coeff, "min_coeff": min_coeff})

    def update(self) -> None:
        """Take one step; collective where ``reduce_norms`` is."""
        trained = [(group, p) for group, parameters in self.groups_with_gradients() for p in parameters]
        work = [(group, p, *self._direction(group, p)) for group, p in trained]
        norms = self.reduce_norms([(p, squares) for _, p, _, squares in work])
        for (group, p, direction, _), (weight, update) in zip(work, norms, strict=True):
            ratio = math.sqrt(weight / update) if weight > 0.0 and update > 0.0 else 1.0
            ratio = min(max(ratio, group["min_coeff"]), group["max_coeff"])
            self._apply(p, direction, float(group["lr"]) * ratio)

    def _direction(self, group: dict[str, Any], p: torch.Tensor) -> tuple[torch.Tensor, tuple[float, float]]:
        """Advance the moments; the direction and the squared norms of ``p`` and of it."""
        state = self.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        step, gradient = int(state["step"]), p.grad
        beta1, beta2 = group["betas"]
        direction = torch.empty_like(p)
        if gradient is not None and _has_kernel(p, gradient):
            ((weight, update),) = lamb_step(
                p.data_ptr(),
                gradient.data_ptr(),
                state["exp_avg"].data_ptr(),
                state["exp_avg_sq"].data_ptr(),
                direction.data_ptr(),
                p.numel(),
                step=step,
                betas=(beta1, beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                bias_correction=group["bias_correction"],
                param_dtype=_DTYPES[p.dtype],
                grad_dtype=_DTYPES[p.dtype],
                state_dtype=_DTYPES[p.dtype],
                threads=torch.get_num_threads(),
            )
            return direction, (weight, update)
        state["exp_avg"].lerp_(gradient, 1.0 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        correction1 = 1.0 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1.0 - beta2**step if group["bias_correction"] else 1.0
        denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
        torch.div(state["exp_avg"] / correction1, denominator, out=direction)
        direction.add_(p, alpha=group["weight_decay"])
        return direction, (_square(p), _square(direction))

    def _apply(self, p: torch.Tensor, direction: torch.Tensor, factor: float) -> None:
        if _has_kernel(p, direction):
            lamb_apply(
                p.data_ptr(),
                direction.data_ptr(),
                p.numel(),
                step=int(self.state[p]["step"]),
                steps=[(p.numel(), factor)],
                param_dtype=_DTYPES[p.dtype],
                threads=torch.get_num_threads(),
            )
        else:
            p.add_(direction, alpha=-factor)


def _norms_of_one_process(partial: PartialNorms, /) -> list[tuple[float, ...]]:
    return [norms for _, norms in partial]


def _has_kernel(p: torch.Tensor, other: torch.Tensor) -> bool:
    plain = p.device.type == "cpu" and p.dtype in _DTYPES
    return plain and other.dtype == p.dtype and p.is_contiguous() and other.is_contiguous()


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())
