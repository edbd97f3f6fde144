"""The base of 1-bit optimizers, and 1-bit Adam."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zero_comm import FeedbackAverage, Group, Tag
from zero_precision import SignCodec

from ..base import AdamHyperparameters, ClosureOptimizer, adam_defaults

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BLOCK = 512  # elements that share a scale: 1.0625 bits per element
_ERRORS = ("worker_error", "server_error")


class OneBitOptimizer(ClosureOptimizer):
    """Replaces the average of gradients by the average of something that one bit per element and error feedback can
    carry. A `zero_partition.AveragingOptimizer`; without `connect` there is one rank, and nothing is lost.

    Moments are kept per parameter; what is averaged goes in one message for all of them, one scale for every 512
    elements. An element whose second moment is zero when that is frozen stays where it is: its step has no size.
    Parameters without a gradient are skipped while gradients are averaged, and count as having a zero one afterwards.

    ``steps`` in the param groups counts the steps taken.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "steps": 0})
        self._group = Group(None)
        self._feedback: FeedbackAverage | None = None

    @property
    def steps(self) -> int:
        """Steps taken."""
        return int(self.param_groups[0]["steps"])

    @property
    def wants_own_gradients(self) -> bool:
        """Return whether the next step takes this rank's own gradients."""
        return self._on_own(self.steps + 1)

    def connect(self, group: Group) -> None:
        """Average over ``group`` from now on."""
        self._group = group

    def synchronise(self) -> bool:
        """Weights never differ between steps."""
        return False

    def rank_state(self) -> dict[str, torch.Tensor]:
        """State that only this rank has and the next step needs: 1-D float32 tensors by name, none before the first
        compressed step."""
        return {} if self._feedback is None else {name: getattr(self._feedback, name) for name in _ERRORS}

    def rank_state_numels(self) -> dict[str, int]:
        """Sizes of `rank_state`, once there is one."""
        ranks = self._group.world_size
        size = FeedbackAverage.slice_numel(sum(p.numel() for _, p in self._parameters()), ranks)
        return dict(zip(_ERRORS, (ranks * size, size), strict=True))

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the ``rank_state`` of this rank; without one, with nothing lost so far."""
        self._feedback = None
        if state:
            feedback = self._opened()
            for name in _ERRORS:
                getattr(feedback, name).copy_(state[name])

    def update(self) -> None:
        """Update every parameter; collective when the gradients are this rank's own."""
        number = self.steps + 1
        for _, p in self._parameters():
            if not self.state[p]:
                self.state[p].update(self._new_state(p))
        self._take_step(number, own=self._on_own(number))
        for group in self.param_groups:
            group["steps"] = number

    @abstractmethod
    def _on_own(self, number: int) -> bool:
        """Return whether step ``number`` (from 1) takes this rank's own gradients."""

    @abstractmethod
    def _take_step(self, number: int, own: bool) -> None:
        """Take step ``number``."""

    def _new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p

    def _advance_moments(self, group: dict[str, Any], p: torch.Tensor, *, variance: bool) -> None:
        """Exponential averages of the gradient and, with ``variance``, of its square."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        if p.grad is None:
            state["exp_avg"].mul_(beta1)
            return
        state["exp_avg"].lerp_(p.grad, 1.0 - beta1)
        if variance:
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)

    def _average(self, tensors: Sequence[torch.Tensor], number: int) -> None:
        """Replace one tensor for each parameter by what all ranks' ones average to; zero where the variance is."""
        flat = torch.cat([tensor.flatten().float() for tensor in tensors])
        self._opened().average(flat, Tag("reduce", "1-bit average", number - 1)).wait()
        start = 0
        for (_, p), tensor in zip(self._parameters(), tensors, strict=True):
            part = flat[start : start + tensor.numel()].view_as(tensor)
            tensor.copy_(part.mul_(self.state[p]["exp_avg_sq"] > 0))
            start += tensor.numel()

    def _opened(self) -> FeedbackAverage:
        if self._feedback is None:
            every = [p for _, p in self._parameters()]
            numel = sum(p.numel() for p in every)
            self._feedback = FeedbackAverage(self._group, SignCodec(_BLOCK), numel, every[0].device)
        return self._feedback


def corrections(group: Mapping[str, Any], number: int, variance_steps: int) -> tuple[float, float]:
    """The bias corrections of both moments at step ``number``, when the second one has seen ``variance_steps``."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1.0 - beta1**number, 1.0 - beta2**variance_steps


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam (arXiv 2102.02888, algorithm 1), with decoupled weight decay.

    The first ``freeze_step`` steps are Adam's. Then the variance stays as it is, every rank advances the momentum with
    its own gradient, and the ranks average their momenta, one bit per element.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, freeze_step: int = 100_000, **adam: Unpack[AdamHyperparameters]
    ) -> None:
        super().__init__(params, adam_defaults(lr, **adam))
        self.freeze_step = freeze_step

    def _on_own(self, number: int) -> bool:
        return number > self.freeze_step

    def _take_step(self, number: int, own: bool) -> None:
        for group, p in self._parameters():
            if own or p.grad is not None:
                self._advance_moments(group, p, variance=not own)
        if own:
            self._average([self.state[p]["exp_avg"] for _, p in self._parameters()], number)
        for group, p in self._parameters():
            if own or p.grad is not None:
                first, second = corrections(group, number, min(number, self.freeze_step))
                adam_step(group, p, self.state[p], first, second)


def adam_step(
    group: dict[str, Any], p: torch.Tensor, state: dict[str, torch.Tensor], first: float, second: float
) -> None:
    """Decay ``p`` and move it along its momentum; ``first`` and ``second`` are the bias corrections."""
    p.mul_(1.0 - group["lr"] * group["weight_decay"])
    p.addcdiv_(state["exp_avg"], denominator(group, state["exp_avg_sq"], second), value=-group["lr"] / first)


def denominator(group: dict[str, Any], variance: torch.Tensor, correction: float) -> torch.Tensor:
    """Return what the momentum is divided by."""
    root: torch.Tensor = variance.sqrt() / correction**0.5
    return root.add_(group["eps"])
