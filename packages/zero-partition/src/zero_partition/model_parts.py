"""The part of the full model that a rank has, where other ranks compute other parts of the same layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from zero_comm import Control, Message

from .norm import NormSquared
from .unit import Unit

_MARKS = ("model_parallel", "tensor_model_parallel")


class ModelParts(Protocol):
    """Which parameters this rank counts in a norm of the full model, and how the parts' sums come together."""

    def norm_of(self, unit: Unit, rank: int, norm: NormSquared) -> NormSquared:
        """The norm of the gradient shard that ``rank`` (of those that share this part) has of ``unit``."""

    def total(self, step: int, square: float, culprit: str) -> tuple[float, str]:
        """The parts' sum of squares together, and the name of the first gradient that is not finite. Collective."""

    def holds_part_of(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is a part of one, and other ranks hold the rest."""

    def abort(self, reason: str) -> None:
        """This rank cannot go on: tell those with the other parts."""

    def close(self) -> None:
        """Give the process group back."""


class UnsplitModel:
    """Every rank has the full model."""

    def norm_of(self, unit: Unit, rank: int, norm: NormSquared) -> NormSquared:
        """Everything counts."""
        return norm

    def total(self, step: int, square: float, culprit: str) -> tuple[float, str]:
        """There are no other parts."""
        return square, culprit

    def holds_part_of(self, parameter: nn.Parameter) -> bool:
        """None is."""
        return False

    def abort(self, reason: str) -> None:
        """There is nobody else to tell."""

    def close(self) -> None:
        """Nothing to give back."""


class TensorParallelModel:
    """Ranks of ``control`` compute every layer together (tensor parallelism).

    DeepSpeed's rule: a parameter with a true attribute ``model_parallel`` or ``tensor_model_parallel`` is a part, and
    counts on every rank; any other is on all of them the same, and counts on the first one only. A gradient that is
    not finite makes every rank's total so, wherever it is.
    """

    def __init__(self, control: Control) -> None:
        self._control = control

    def norm_of(self, unit: Unit, rank: int, norm: NormSquared) -> NormSquared:
        """Of the elements that this rank counts."""
        if self._control.rank == 0:
            return norm
        by_name = dict(zip(unit.names, unit.parameters, strict=True))
        spans = [
            (f.shard_offset, f.shard_offset + f.length)
            for f in unit.layout.fragments(rank)
            if self.holds_part_of(by_name[f.entry.name])
        ]
        return CountedNorm(norm, spans)

    def total(self, step: int, square: float, culprit: str) -> tuple[float, str]:
        """Sums in rank order, so that every rank has the same digits."""
        answers = self._control.agree(Message("the step's norm over the model's parts", "", step, [square, culprit]))
        return sum(answer[0] for answer in answers), next((answer[1] for answer in answers if answer[1]), "")

    def holds_part_of(self, parameter: nn.Parameter) -> bool:
        """By the parameter's attributes."""
        return any(bool(getattr(parameter, mark, False)) for mark in _MARKS)

    def abort(self, reason: str) -> None:
        """Tell the ranks that wait for this one's norm why it does not come."""
        self._control.abort(reason)

    def close(self) -> None:
        """Leave the control messages of the model's parts."""
        self._control.close()


class CountedNorm:
    """`NormSquared` of the elements in ``spans`` (start, end); NaN when one of the others is not finite."""

    def __init__(self, norm: NormSquared, spans: Sequence[tuple[int, int]]) -> None:
        self._norm = norm
        self._spans = spans

    def __call__(self, x: torch.Tensor) -> float:
        """Sum of squares in float64."""
        counted = sum(self._norm(x[start:end]) for start, end in self._spans)
        return counted if math.isfinite(self._norm(x)) else math.nan
