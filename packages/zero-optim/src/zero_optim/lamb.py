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
"""The optimizer's tensors, each with the squared norms (weight, update direction) of its elements."""


class ReduceNorms(Protocol):
    """Turns squared norms of fragments into those of full parameters; a function with this signature."""

    def __call__(self, partial: PartialNorms, /) -> list[tuple[float, ...]]:
        """Return the squared norms of the full parameter for each entry of ``partial``, in this order: their sums over
        all fragments of the parameter. Collective where fragments are on several ranks.
        """


class Lamb(ClosureOptimizer):
    """LAMB (arXiv 1904.00962, algorithm 2) on any device, for parameters or fragments of sharded ones.

    ``params`` and ``lr`` are those of torch's optimizers. A step computes all update directions, then the norms of full
    parameters, then applies the directions. The trust ratio (norm of the weight over that of the direction) is 1 where
    either norm is 0, then limited to ``min_coeff`` ... ``max_coeff``.

    Attributes:
        reduce_norms: adds up squared norms over fragments; by default every tensor counts as a full parameter.
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
        self.reduce_norms: ReduceNorms = _unreduced_norms
        super().__init__(params, {**adam_defaults(lr, **adam), "max_coeff": max_coeff, "min_coeff": min_coeff})

    def update(self) -> None:
        """Update every parameter that has a gradient; collective if ``reduce_norms`` is."""
        trained = [(group, p) for group, parameters in self.groups_with_gradients() for p in parameters]
        work = [(group, p, *self._direction(group, p)) for group, p in trained]
        norms = self.reduce_norms([(p, squares) for _, p, _, squares in work])
        for (group, p, direction, _), (weight, update) in zip(work, norms, strict=True):
            ratio = math.sqrt(weight / update) if weight > 0.0 and update > 0.0 else 1.0
            ratio = min(max(ratio, group["min_coeff"]), group["max_coeff"])
            self._apply(p, direction, float(group["lr"]) * ratio)

    def _direction(self, group: dict[str, Any], p: torch.Tensor) -> tuple[torch.Tensor, tuple[float, float]]:
        """Advance the step count and the moments of ``p``, which has a gradient; return its update direction, a new
        tensor, and the squared norms (``p``, direction). Where there is no kernel, the host waits for both norms.
        """
        state = self.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        step, gradient = int(state["step"]), p.grad
        beta1, beta2 = group["betas"]
        direction = torch.empty_like(p)
        if gradient is not None and _has_kernel(p, gradient, state["exp_avg"], state["exp_avg_sq"]):
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
        return direction, (_squared_norm(p), _squared_norm(direction))

    def _apply(self, p: torch.Tensor, direction: torch.Tensor, factor: float) -> None:
        """Subtract ``factor * direction`` from ``p`` in place, by a CPU kernel where there is one for both tensors,
        else by torch.
        """
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


def _unreduced_norms(partial: PartialNorms, /) -> list[tuple[float, ...]]:
    """Return the squared norms in ``partial`` unchanged, as every tensor is a full parameter: the default for
    ``reduce_norms``."""
    return [norms for _, norms in partial]


def _has_kernel(p: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether the CPU kernels support ``p`` together with ``others``, tensors that one call takes with it, such
    as its gradient or moments."""
    plain = p.device.type == "cpu" and p.dtype in _DTYPES and p.is_contiguous()
    return plain and all(other.dtype == p.dtype and other.is_contiguous() for other in others)


def _squared_norm(x: torch.Tensor) -> float:
    """Return the sum of the squares of all elements, computed in float64; the host waits for it."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())
