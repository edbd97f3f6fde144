"""Optimizers that a configuration names and torch has not: Lion, Muon with AdamW, LAMB over fragments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from zero_optim_kernels import lamb_apply, lamb_step


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What ``closure`` returns, run with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolation of gradient and moment, decoupled decay."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            gradients = [p.grad for p in trained]
            for p in trained:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments = [self.state[p]["exp_avg"] for p in trained]
            beta1, beta2 = group["betas"]
            directions = torch._foreach_lerp(gradients, moments, beta1)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(trained, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(trained, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1.0 - beta2)
        return loss


_FLAG = "use_muon"


class MuonWithAdam(Optimizer):
    """torch.optim.Muon and torch.optim.AdamW behind one list of param groups; a group's ``use_muon`` chooses.

    ``groups``: dicts with ``params``, ``use_muon``, and the hyperparameters of that optimizer.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        given = [dict(group) for group in groups]
        made: list[dict[str, Any]] = []
        for group in given:
            matrix = group.pop(_FLAG)
            kind = torch.optim.Muon if matrix else torch.optim.AdamW
            made += [{**filled, _FLAG: matrix} for filled in kind([group]).param_groups]
        super().__init__(made, {})

    @classmethod
    def over(cls, model: nn.Module, parameters: Any, arguments: dict[str, Any]) -> MuonWithAdam:
        """Split ``parameters`` of ``model`` (a list, or dicts with ``params``).

        A parameter's own attribute ``use_muon`` decides where it has one, else matrices go to Muon, except embeddings
        and what shares a weight with one.
        """
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        listed = parameters if any(isinstance(p, dict) for p in parameters) else [{"params": parameters}]
        rate = arguments["lr"]
        muon = {"lr": arguments.get("muon_lr", rate), "momentum": arguments["momentum"]}
        adam = {"lr": arguments.get("adam_lr", rate), "betas": arguments["betas"], "eps": arguments["eps"]}
        groups: list[dict[str, Any]] = []
        for group in listed:
            own = {key: value for key, value in group.items() if key != "params"}
            by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
            for given in group["params"]:
                p = given[1] if isinstance(given, tuple) else given
                by_kind[bool(getattr(p, _FLAG, p.ndim == 2 and id(p) not in embeddings))].append(p)
            for matrix, params in by_kind.items():
                if params:
                    base = {**(muon if matrix else adam), "weight_decay": arguments["weight_decay"]}
                    groups.append({**base, **own, "params": params, _FLAG: matrix})
        return cls(groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            kind = torch.optim.Muon if group[_FLAG] else torch.optim.AdamW
            part = kind([{**{k: v for k, v in group.items() if k != _FLAG}, "params": trained}])
            part.state = self.state
            part.step(None)  # type: ignore[no-untyped-call]
        return loss


_DTYPES: dict[torch.dtype, Literal["f32", "f64"]] = {torch.float32: "f32", torch.float64: "f64"}


class Lamb(Optimizer):
    """LAMB (arXiv 1904.00962, algorithm 2) on any device, in two halves with the norms of whole parameters in between.

    ``reduce_norms`` turns the squared norms (weight, direction) of what this process has of each parameter into those
    of the whole parameters; on its own an optimizer has all of them. The ratio of the norms is kept between
    ``min_coeff`` and ``max_coeff``; it is 1 where either norm is 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        self.reduce_norms: Callable[[Any], list[tuple[float, ...]]] = _norms_of_one_process
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; collective where ``reduce_norms`` is."""
        loss = loss_of(closure)
        trained = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        work = [(group, p, *self._direction(group, p)) for group, p in trained]
        norms = self.reduce_norms([(p, squares) for _, p, _, squares in work])
        for (group, p, direction, _), (weight, update) in zip(work, norms, strict=True):
            ratio = math.sqrt(weight / update) if weight > 0.0 and update > 0.0 else 1.0
            ratio = min(max(ratio, group["min_coeff"]), group["max_coeff"])
            self._apply(p, direction, float(group["lr"]) * ratio)
        return loss

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


def _norms_of_one_process(partial: Any) -> list[tuple[float, ...]]:
    return [norms for _, norms in partial]


def _has_kernel(p: torch.Tensor, other: torch.Tensor) -> bool:
    plain = p.device.type == "cpu" and p.dtype in _DTYPES
    return plain and other.dtype == p.dtype and p.is_contiguous() and other.is_contiguous()


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())
