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
    """Base of optimizers that in most steps average their momenta over the ranks instead of the gradients, with one bit
    per element and error feedback.

    It is a `zero_partition.AveragingOptimizer`. Until `connect` it averages over one rank, which changes nothing.

    The tensors of all parameters are averaged in one message, with one scale for every 512 elements. An element whose
    second moment is zero when that is frozen is no longer updated, as nothing scales its step. A parameter without a
    gradient is skipped in steps with averaged gradients; in the others its gradient counts as zero.

    ``steps`` in the param groups counts the steps taken. ``params``, ``defaults``: as for `torch.optim.Optimizer`.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "steps": 0})
        self._group = Group(None)
        self._feedback: FeedbackAverage | None = None

    @property
    def steps(self) -> int:
        """Return the number of steps taken."""
        return int(self.param_groups[0]["steps"])

    @property
    def wants_own_gradients(self) -> bool:
        """Return whether the next step needs this rank's own gradients instead of the ranks' average."""
        return self._uses_own_gradients(self.steps + 1)

    def connect(self, group: Group) -> None:
        """Average over the ranks of ``group`` from now on; called once, before the first step. Does not communicate."""
        self._group = group

    def synchronise(self) -> bool:
        """Return False, without communication: the ranks' weights are equal after every step. A subclass overrides it
        if its are not."""
        return False

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Return the state that differs between ranks, for a checkpoint: the error feedback (what earlier averages have
        rounded away), as 1-D float32 tensors by name, which are not copied.

        Empty before the first average.
        """
        return {} if self._feedback is None else {name: getattr(self._feedback, name) for name in _ERRORS}

    def rank_state_numels(self) -> dict[str, int]:
        """Return, by name, the number of elements of each tensor of error feedback that `rank_state` returns once there
        was a compressed average; known before it, so that a checkpoint can be planned."""
        ranks = self._group.world_size
        size = FeedbackAverage.slice_numel(sum(p.numel() for _, p in self._parameters()), ranks)
        return dict(zip(_ERRORS, (ranks * size, size), strict=True))

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the error feedback to copies of what `rank_state` returned on this rank; an empty ``state`` resets it to
        zero."""
        self._feedback = None
        if state:
            feedback = self._feedback_average()
            for name in _ERRORS:
                getattr(feedback, name).copy_(state[name])

    def update(self) -> None:
        """Take one step and count it, creating states that are missing; collective in steps in which the ranks
        average."""
        number = self.steps + 1
        for _, p in self._parameters():
            if not self.state[p]:
                self.state[p].update(self._new_state(p))
        self._take_step(number, own=self._uses_own_gradients(number))
        for group in self.param_groups:
            group["steps"] = number

    @abstractmethod
    def _uses_own_gradients(self, number: int) -> bool:
        """Return whether step ``number`` (from 1) uses this rank's own gradients instead of averaged ones."""

    @abstractmethod
    def _take_step(self, number: int, own: bool) -> None:
        """Update moments and parameters in step ``number`` (from 1); ``own``: the gradients are this rank's own.
        Collective where the ranks average."""

    def _new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of ``p`` before its first step: both moments, zero, like ``p``. Subclasses add to it."""
        return {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield (param group, parameter) for every parameter, in order."""
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p

    def _advance_moments(self, group: dict[str, Any], p: torch.Tensor, *, variance: bool) -> None:
        """Advance the first moment of ``p`` by its gradient (zero without one), and with ``variance`` the second
        moment, unless there is no gradient."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        if p.grad is None:
            state["exp_avg"].mul_(beta1)
            return
        state["exp_avg"].lerp_(p.grad, 1.0 - beta1)
        if variance:
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)

    def _average_over_ranks(self, tensors: Sequence[torch.Tensor], number: int) -> None:
        """Replace ``tensors``, one for each parameter, by their averages over the ranks, in place. Elements whose
        second moment is 0 become 0.

        ``number``: the step, from 1. Collective, and waits for the result; the error feedback is updated.
        """
        flat = torch.cat([tensor.flatten().float() for tensor in tensors])
        self._feedback_average().average(flat, Tag("reduce", "1-bit average", number - 1)).wait()
        start = 0
        for (_, p), tensor in zip(self._parameters(), tensors, strict=True):
            part = flat[start : start + tensor.numel()].view_as(tensor)
            tensor.copy_(part.mul_(self.state[p]["exp_avg_sq"] > 0))
            start += tensor.numel()

    def _feedback_average(self) -> FeedbackAverage:
        """Return the object that averages over the group with error feedback; it is created at the first call."""
        if self._feedback is None:
            every = [p for _, p in self._parameters()]
            numel = sum(p.numel() for p in every)
            self._feedback = FeedbackAverage(self._group, SignCodec(_BLOCK), numel, every[0].device)
        return self._feedback


def check_positive(optimizer: type, **steps: int) -> None:
    """Raise ValueError, naming ``optimizer`` and the option, unless all options given are 1 or more."""
    for name, value in steps.items():
        if value < 1:
            hint = "; the variance comes from the steps before it is frozen" if "freeze" in name else ""
            raise ValueError(f"{optimizer.__name__}: {name}: expected 1 or more, got {value}{hint}")


def bias_corrections(group: Mapping[str, Any], number: int, variance_steps: int) -> tuple[float, float]:
    """Return what Adam divides the first and the second moment by at step ``number`` (from 1); 1 and 1 if the group has
    bias correction off.

    ``variance_steps``: how often the second moment was updated.
    """
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1.0 - beta1**number, 1.0 - beta2**variance_steps


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam (arXiv 2102.02888, algorithm 1), with decoupled weight decay.

    The first ``freeze_step`` steps are Adam's. Then the variance is frozen: every rank advances the momentum with its
    own gradient, and the ranks average their momenta, one bit per element. Raises ValueError for a ``freeze_step``
    below 1: without a step of Adam there is no variance to freeze. ``params``, ``lr``, ``adam``: as for Adam
    (`AdamHyperparameters`).
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, freeze_step: int = 100_000, **adam: Unpack[AdamHyperparameters]
    ) -> None:
        check_positive(type(self), freeze_step=freeze_step)
        super().__init__(params, adam_defaults(lr, **adam))
        self.freeze_step = freeze_step

    def _uses_own_gradients(self, number: int) -> bool:
        """Return whether step ``number`` (from 1) uses this rank's own gradients: one after ``freeze_step``."""
        return number > self.freeze_step

    def _take_step(self, number: int, own: bool) -> None:
        """Take step ``number``, a step of Adam. If the gradients are this rank's ``own``, the variance stays and the
        momenta are averaged over the ranks, which is collective."""
        for group, p in self._parameters():
            if own or p.grad is not None:
                self._advance_moments(group, p, variance=not own)
        if own:
            self._average_over_ranks([self.state[p]["exp_avg"] for _, p in self._parameters()], number)
        for group, p in self._parameters():
            if own or p.grad is not None:
                first, second = bias_corrections(group, number, min(number, self.freeze_step))
                apply_adam(group, p, self.state[p], first, second)


def apply_adam(
    group: dict[str, Any], p: torch.Tensor, state: dict[str, torch.Tensor], first: float, second: float
) -> None:
    """Decay the parameter ``p`` and apply one step of Adam to it, in place, from its moments in ``state``. ``first``,
    ``second``: the bias corrections, by which these are divided. ``group`` has ``lr``, ``weight_decay`` and ``eps``."""
    p.mul_(1.0 - group["lr"] * group["weight_decay"])
    p.addcdiv_(state["exp_avg"], adam_denominator(group, state["exp_avg_sq"], second), value=-group["lr"] / first)


def adam_denominator(group: dict[str, Any], variance: torch.Tensor, correction: float) -> torch.Tensor:
    """Return ``sqrt(variance / correction) + eps``; ``correction``: the variance's bias correction."""
    root: torch.Tensor = variance.sqrt() / correction**0.5
    return root.add_(group["eps"])
