"""The relation of a rank's model to the full one under tensor parallelism, for norms over the full model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from zero_comm import Control, Message

from .norm import NormSquared
from .unit import Unit

_PART_ATTRIBUTES = ("model_parallel", "tensor_model_parallel")


class ModelParts(Protocol):
    """Says which parameters this rank counts in a norm of the full model, and adds the sums of the model's parts.

    A part is what one rank has of a model whose layers several ranks compute together; each part has its own partition.
    """

    def norm_of(self, unit: Unit, rank: int, norm: NormSquared) -> NormSquared:
        """Return a function that gives this part's share of a gradient shard's sum of squares, computed by ``norm``.

        The shard is that of rank ``rank``, among the ranks that shard this part of the model, of ``unit``. Elements
        that other parts of the model hold as well count in one of them only.
        """

    def total(self, step: int, square: float, culprit: str) -> tuple[float, str]:
        """Return the sum of all parts' ``square``, and the first ``culprit``, in rank order, that is not empty.
        Collective.

        ``culprit``: this part's first parameter with a gradient that is not finite, "" without. ``step``: the step's
        number.
        """

    def holds_part_of(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank has only a part of ``parameter``, and other ranks of the model hold the rest."""

    def abort(self, reason: str) -> None:
        """Tell the ranks with the other parts why this one cannot continue (``reason``), so that none waits for it."""

    def close(self) -> None:
        """Leave the process group of the model's parts."""


class UnsplitModel:
    """The null `ModelParts`: without tensor parallelism every rank has the full model."""

    def norm_of(self, unit: Unit, rank: int, norm: NormSquared) -> NormSquared:
        """Return ``norm``, as this rank counts all elements."""
        return norm

    def total(self, step: int, square: float, culprit: str) -> tuple[float, str]:
        """Return ``square`` and ``culprit``, as there are no other parts."""
        return square, culprit

    def holds_part_of(self, parameter: nn.Parameter) -> bool:
        """Return False, as every rank has the full model."""
        return False

    def abort(self, reason: str) -> None:
        """Do nothing, as there are no other parts."""

    def close(self) -> None:
        """Do nothing, as there is no process group."""


class TensorParallelModel:
    """The `ModelParts` of a model whose layers the ranks of ``control`` compute together (tensor parallelism).

    DeepSpeed's rule: a parameter with a true attribute ``model_parallel`` or ``tensor_model_parallel`` is a part, and
    counts on every rank; any other is the same on all these ranks, and counts on the first one only. A gradient that is
    not finite on any rank makes the total of every rank not finite.
    """

    def __init__(self, control: Control) -> None:
        self._control = control

    def norm_of(self, unit: Unit, rank: int, norm: NormSquared) -> NormSquared:
        """Return ``norm`` on the first rank; on others one that counts only the elements of parameters that are parts
        (`CountedNorm`), in the shard of ``rank`` of ``unit``."""
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
        """Return the sum of all parts' ``square``, added in rank order, so that every rank gets the same bits, and the
        first ``culprit`` that is not empty. Collective."""
        answers = self._control.agree(Message("the step's norm over the model's parts", "", step, [square, culprit]))
        return sum(answer[0] for answer in answers), next((answer[1] for answer in answers if answer[1]), "")

    def holds_part_of(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is marked as a part by one of DeepSpeed's attributes."""
        return any(bool(getattr(parameter, name, False)) for name in _PART_ATTRIBUTES)

    def abort(self, reason: str) -> None:
        """Tell the ranks that wait for this one's norm why it will not come."""
        self._control.abort(reason)

    def close(self) -> None:
        """Close the control group of the model's parts."""
        self._control.close()


class CountedNorm:
    """A `NormSquared`, by ``norm``, over the elements in ``spans``, ranges [start, end) of the tensor; NaN if an
    element outside them is not finite."""

    def __init__(self, norm: NormSquared, spans: Sequence[tuple[int, int]]) -> None:
        self._norm = norm
        self._spans = spans

    def __call__(self, x: torch.Tensor) -> float:
        """Return the sum of squares of the counted elements of ``x`` (1-D), in float64; NaN if another one is not
        finite."""
        counted = sum(self._norm(x[start:end]) for start, end in self._spans)
        return counted if math.isfinite(self._norm(x)) else math.nan
