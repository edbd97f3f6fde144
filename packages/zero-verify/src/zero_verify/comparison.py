"""Find the first value in which two recorded runs differ. A ``kind`` of tensor is "gradient" or "weight" (after the
step)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .recording import GRADIENT, WEIGHT, Recording, Step

_NORM_TOLERANCE = 1e-12  # norms are sums in float64, whose order follows the units; autocast has others at stage 3
_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs.

    ``engine``: empty if there is only one. ``step``: from 0. ``what``: such as "the gradient". ``name``: the parameter,
    empty for a scalar. ``detail``: the size of the difference. ``others``: other parameters whose ``what`` differs in
    that step.
    """

    engine: str
    step: int
    what: str
    name: str
    detail: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = f"{self.what} of '{self.name}'" if self.name else self.what
        where = f"{self.engine}, " if self.engine else ""
        text = f"{where}step {self.step}: {subject} differs: {self.detail}"
        if self.others:
            more = f" and {len(self.others) - _SHOWN} more" if len(self.others) > _SHOWN else ""
            text += f"\n  so does {self.what} of {', '.join(self.others[:_SHOWN])}{more}"
        return text


class Judge(Protocol):
    """Decides which differences count between ``expected``, a value or step of the reference run, and ``got``, that of
    the other run. ``number``: the step's number, from 0.

    A description of a difference is text for people; it is empty where the difference does not count."""

    def loss(self, number: int, expected: float, got: float) -> str:
        """Return a description of the difference between two losses, empty if it is acceptable."""

    def norm(self, number: int, expected: float, got: float) -> str:
        """Return a description of the difference between two gradient norms, empty if it is acceptable."""

    def reads(self, expected: Step, got: Step) -> Iterator[tuple[str, str]]:
        """Yield (parameter name, description) for each weight whose values differ where a module's forward read it."""

    def tensors(self, number: int, kind: str, expected: Step, got: Step) -> Iterator[tuple[str, str]]:
        """Yield (parameter name, description) for each full tensor of ``kind`` that differs."""

    def should_continue(self, expected: Step, got: Step) -> bool:
        """Return whether to compare further steps of the engine after these two."""


def compare(expected: Recording, got: Recording, judge: Judge) -> Difference | None:
    """Return the first difference of two runs that ``judge`` does not accept, in the order in which the values were
    computed; None if there is none.

    Compared per step are the weights that forward reads on each rank, losses, averaged gradients, the gradient norm,
    and the weights after the step. Runs also differ if they have different numbers of engines or of steps of an engine;
    the latter only if ``judge`` compared all steps of that engine."""
    if len(expected.engines) != len(got.engines):
        return Difference("", 0, "the number of engines", "", _scalars(len(expected.engines), len(got.engines)))
    for engine in range(len(expected.engines)):
        where = expected.engines[engine].name if len(expected.engines) > 1 else ""
        steps = expected.count(engine), got.count(engine)
        for number, (ours, theirs) in enumerate(zip(expected.steps(engine), got.steps(engine), strict=False)):
            found = _first_difference(number, ours, theirs, judge)
            if found is not None:
                what, name, detail, others = found
                return Difference(where, number, what, name, detail, others)
            if not judge.should_continue(ours, theirs):
                break
        else:
            if steps[0] != steps[1]:
                return Difference(where, min(steps), "the number of steps", "", _scalars(*steps))
    return None


def _first_difference(
    number: int, expected: Step, got: Step, judge: Judge
) -> tuple[str, str, str, tuple[str, ...]] | None:
    """Return (what, name, detail, others), fields of the `Difference`, for the first difference in step ``number`` that
    ``judge`` does not accept; None if there is none."""
    found = list(judge.reads(expected, got))
    if found:
        return _named("the weight that forward reads", found)
    if [len(losses) for losses in expected.losses] != [len(losses) for losses in got.losses]:
        detail = _scalars([len(losses) for losses in expected.losses], [len(losses) for losses in got.losses])
        return "the number of losses by rank", "", detail, ()
    for rank, pair in enumerate(zip(expected.losses, got.losses, strict=True)):
        for micro, (ours, theirs) in enumerate(zip(*pair, strict=True)):
            detail = judge.loss(number, ours, theirs)
            if detail:
                return f"the loss of backward {micro} on rank {rank}", "", detail, ()
    found = list(judge.tensors(number, GRADIENT, expected, got))
    if found:
        return _named("the gradient", found)
    detail = judge.norm(number, expected.norm, got.norm)
    if detail:
        return "the gradient norm", "", detail, ()
    found = list(judge.tensors(number, WEIGHT, expected, got))
    return _named("the weight after the step", found) if found else None


def _named(what: str, found: Sequence[tuple[str, str]]) -> tuple[str, str, str, tuple[str, ...]]:
    """Return (what, name, detail, others), fields of one `Difference`, for the differences ``found`` in one step: the
    first one is named, the parameters of the rest are the others.

    ``what``: such as "the gradient"; ``found``: (parameter name, description), one or more."""
    name, detail = found[0]
    return what, name, detail, tuple(dict.fromkeys(other for other, _ in found if other != name))


class Bitwise:
    """A `Judge` that accepts bitwise equal values only. Gradient norms may differ as much as the order of a float64 sum
    makes them. ``number``: the step's number, from 0.

    Descriptions of differences are text, empty where the difference is accepted."""

    def loss(self, number: int, expected: float, got: float) -> str:
        """Return "" for equal losses, two NaN included; else both values as text."""
        same = expected == got or (math.isnan(expected) and math.isnan(got))
        return "" if same else _scalars(expected, got)

    def norm(self, number: int, expected: float, got: float) -> str:
        """Return "" for two norms with a relative difference of at most 1e-12, and for two NaN; else both values as
        text."""
        close = math.isclose(expected, got, rel_tol=_NORM_TOLERANCE)
        return "" if close else self.loss(number, expected, got)

    def reads(self, expected: Step, got: Step) -> Iterator[tuple[str, str]]:
        """Yield (parameter name, description) for each weight that some rank read with other bits than in the expected
        run. Reads that only one run recorded, as compiled regions cause, are not compared."""
        for (rank, name), digests in expected.reads.items():
            for use, (ours, theirs) in enumerate(zip(digests, got.reads.get((rank, name), []), strict=False)):
                if ours != theirs:
                    yield name, f"on rank {rank} its values are not those of the reference (use {use} in the step)"
                    break

    def tensors(self, number: int, kind: str, expected: Step, got: Step) -> Iterator[tuple[str, str]]:
        """Yield (parameter name, description) for each tensor of ``kind`` in which any bit, or the dtype, differs. A
        tensor that one run lacks counts as zeros."""
        for name, ours, theirs in _pairs(kind, expected, got):
            if ours.dtype != theirs.dtype:
                yield name, _scalars(ours.dtype, theirs.dtype)
            elif not torch.equal(_bits(ours), _bits(theirs)):
                yield name, _elements(ours, theirs)

    def should_continue(self, expected: Step, got: Step) -> bool:
        """Return True: all steps of both runs are compared."""
        return True


class Within:
    """A `Judge` that accepts relative differences up to ``bound`` times the number of steps so far (``number`` + 1).

    Losses and norms: relative to the expected one. A tensor: the root mean square of the difference, relative to that
    of the expected tensor or of all tensors of its kind, whichever is larger: where a tensor's gradient is a small
    difference of large numbers, only the latter means anything. Values that are not finite are accepted if they are
    equal or both NaN."""

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def loss(self, number: int, expected: float, got: float) -> str:
        """Return "" if the relative difference is at most the bound times the steps so far, or if values that are not
        finite are alike; else a description: both losses, and what is allowed."""
        if not (math.isfinite(expected) and math.isfinite(got)):
            return Bitwise().loss(number, expected, got)
        limit = self.bound * (number + 1)
        if abs(expected - got) <= limit * max(abs(expected), limit):
            return ""
        return f"{_scalars(expected, got)}; allowed are {limit:.3g} of it"

    def norm(self, number: int, expected: float, got: float) -> str:
        """Return a description of the difference between two gradient norms, empty if it is accepted, by the rule of
        `loss`."""
        return self.loss(number, expected, got)

    def reads(self, expected: Step, got: Step) -> Iterator[tuple[str, str]]:
        """Yield nothing: of the weights that forward reads only digests are recorded, which say nothing about how close
        values are."""
        yield from ()

    def tensors(self, number: int, kind: str, expected: Step, got: Step) -> Iterator[tuple[str, str]]:
        """Yield (parameter name, description) for each tensor of ``kind`` that deviates, as a root mean square, by more
        than the bound times the steps so far, or that has an element that is not finite in one run only."""
        limit = self.bound * (number + 1)
        rows = []
        for name, ours, theirs in _pairs(kind, expected, got):
            reference, other = ours.double(), theirs.double()
            alike = (reference == other) | (reference.isnan() & other.isnan())
            differences = (other - reference).masked_fill(alike, 0.0)
            finite = reference.masked_fill(~reference.isfinite(), 0.0)
            rows.append((name, _rms(differences), _rms(finite), reference.numel()))
        numel = max(1, sum(count for *_, count in rows))
        overall = math.sqrt(sum(size * size * count for *_, size, count in rows) / numel)
        for name, deviation, size, _ in rows:
            if not deviation <= limit * max(size, overall):
                ratio = deviation / max(size, overall) if max(size, overall) else math.inf
                yield name, f"it deviates by {ratio:.3g} (root mean square), allowed are {limit:.3g}"

    def should_continue(self, expected: Step, got: Step) -> bool:
        """Return whether the optimizer took this step in both runs or skipped it in both. After a skip in one of them,
        weights may differ by more than the bound."""
        return expected.taken == got.taken


def _pairs(kind: str, expected: Step, got: Step) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (parameter name, expected tensor, tensor got) for each parameter that has a tensor of ``kind`` in either
    step, in the model's order. Zeros stand for a tensor that one step lacks."""
    ours, theirs = expected.names(kind), got.names(kind)
    for name in dict.fromkeys([*ours, *theirs]):
        left = expected.tensor(kind, name) if name in ours else None
        right = got.tensor(kind, name) if name in theirs else None
        some = left if left is not None else right
        if some is not None:
            zeros = torch.zeros_like(some)
            yield name, zeros if left is None else left, zeros if right is None else right


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as 1-D uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def _rms(tensor: torch.Tensor) -> float:
    """Return the root mean square of a tensor; 0 if it is empty."""
    return math.sqrt(float(tensor.square().mean())) if tensor.numel() else 0.0


def _scalars(expected: object, got: object) -> str:
    """Return text that names both values, such as "expected 1.0, got 2.0"."""
    return f"expected {expected}, got {got}"


def _elements(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Return text on how two tensors of one shape and dtype differ: the number of elements with different bits, the
    first of them, and the largest difference. At least one bit must differ."""
    width = expected.element_size()
    unequal = (_bits(expected) != _bits(got)).view(-1, width).any(1)
    first = int(unequal.nonzero()[0, 0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), expected.shape)] if expected.dim() else []
    largest = float((expected.double() - got.double()).abs().max())
    return (
        f"{int(unequal.sum()):,} of {expected.numel():,} elements, the first at {place}: "
        f"{_scalars(float(expected.reshape(-1)[first]), float(got.reshape(-1)[first]))}; "
        f"the largest difference is {largest:.3g}"
    )
