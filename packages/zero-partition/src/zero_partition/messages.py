"""Messages of the ranks of one engine.

Each message is a frozen dataclass. `encode` gives plain data, which travels as JSON, and `decode` makes the message of
what another rank's `encode` gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Edits = dict[str, str]
"""By ``unit.number``: a digest of the values that user code gave a parameter, or the reason of a refusal behind an
exclamation mark."""


@dataclass
class StepNumber:
    """The number of the step under way, which every message and every collective of an engine carries."""

    value: int = 0


class Completion(NamedTuple):
    """A unit whose gradients are complete, and how many units this rank had gathered for the pass by then."""

    unit: int
    gathers: int


@dataclass(frozen=True)
class ReductionsSeen:
    """How one rank's last backward pass went.

    ``completions``: in order. ``gathered``: the units that the rank gathered, in order. ``steady``: every unit had as
    many gradients as in the pass before.
    """

    completions: Sequence[Completion]
    gathered: Sequence[int]
    steady: bool

    def encode(self) -> dict[str, Any]:
        """Plain data."""
        return {"finished": list(self.completions), "used": list(self.gathered), "steady": self.steady}

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> ReductionsSeen:
        """The message that `encode` made ``data`` of."""
        return cls([Completion(*pair) for pair in data["finished"]], data["used"], data["steady"])


@dataclass(frozen=True)
class Observations:
    """The words that one rank has for the others at their next meeting, whatever that is about.

    ``gathers``: by pass, the units that it gathered in order of first use, where they did not follow a learned order.
    ``reductions``: how its last backward pass went, until an order is settled. ``changed``: units whose shard it alone
    has written. ``edits``: parameters that user code has changed. ``discards``: a digest of the averaged gradients that
    were discarded since the last step.
    """

    gathers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    reductions: ReductionsSeen | None = None
    changed: Sequence[int] = field(default_factory=list)
    edits: Edits = field(default_factory=dict)
    discards: int = 0

    def encode(self) -> list[Any]:
        """Plain data."""
        reductions = None if self.reductions is None else self.reductions.encode()
        return [dict(self.gathers), reductions, list(self.changed), self.edits, self.discards]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> Observations:
        """The message that `encode` made ``data`` of."""
        gathers, reductions, changed, edits, discards = data
        seen = None if reductions is None else ReductionsSeen.decode(reductions)
        return cls(gathers, seen, changed, edits, discards)


@dataclass(frozen=True)
class LockStep:
    """The gather that one rank waits for next, in a backward pass whose order is not known yet.

    ``gather``: position of the gather in the pass's order; -1 for none. ``issued``: gathers issued. ``started``:
    reductions started. ``done``: all of the rank's gradients are there.
    """

    gather: int
    issued: int
    started: int
    done: bool

    def encode(self) -> list[Any]:
        """Plain data."""
        return [self.gather, self.issued, self.started, self.done]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> LockStep:
        """The message that `encode` made ``data`` of."""
        return cls(*data)


@dataclass(frozen=True)
class PassProgress:
    """How far one rank was in a pass that failed: the gathers and reductions that it has issued."""

    gathers: int
    reductions: int

    def encode(self) -> list[int]:
        """Plain data."""
        return [self.gathers, self.reductions]

    @classmethod
    def decode(cls, data: Sequence[int]) -> PassProgress:
        """The message that `encode` made ``data`` of."""
        return cls(*data)


@dataclass(frozen=True)
class Standing:
    """Where one rank was when a failure ended the process groups.

    ``interrupted``: what was writing weights or states, if anything. ``steps``, ``micro_steps``, ``samples``: what its
    training loop has counted.
    """

    interrupted: str | None
    steps: int
    micro_steps: int
    samples: int

    def encode(self) -> list[Any]:
        """Plain data."""
        return [self.interrupted, self.steps, self.micro_steps, self.samples]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> Standing:
        """The message that `encode` made ``data`` of."""
        return cls(*data)


@dataclass(frozen=True)
class WrittenGradients:
    """One rank's words about gradients that its user wrote since the last step.

    ``written``: by unit, the numbers of the parameters whose ``.grad`` was assigned, edited or taken away.
    ``edited``: by unit, a digest of what in-place changes left of the average (stage 0).
    """

    written: Mapping[int, Sequence[int]] = field(default_factory=dict)
    edited: Mapping[int, int] = field(default_factory=dict)

    def encode(self) -> list[Any]:
        """Plain data; empty in an ordinary step."""
        return [list(self.written.items()), list(self.edited.items())] if self.written or self.edited else []

    @classmethod
    def decode(cls, data: Sequence[Any]) -> WrittenGradients:
        """The message that `encode` made ``data`` of."""
        return cls(*map(dict, data))


@dataclass(frozen=True)
class StepReport:
    """One rank's knowledge of the gradients of a step.

    ``late``: units with gradients that no reduction has taken. ``square``: the sum of squares of its shards' gradients,
    as `NormSums.pack` gives it. ``untouched``: by unit, the numbers of the parameters that had no gradient.
    ``culprit``: the first parameter whose gradient is not finite; empty when all are. ``hooked``: the user has hooks
    that run before the optimizer's arithmetic, and may fail. ``hyperparameters``: a digest of the groups'.
    """

    late: Sequence[int]
    square: Any
    untouched: Mapping[int, Sequence[int]]
    culprit: str
    written: WrittenGradients
    hooked: bool
    hyperparameters: int

    def encode(self) -> list[Any]:
        """Plain data."""
        untouched = list(self.untouched.items())
        told = [list(self.late), self.square, untouched, self.culprit, self.written.encode()]
        return [*told, self.hooked, self.hyperparameters]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> StepReport:
        """The message that `encode` made ``data`` of."""
        late, square, untouched, culprit, written, *rest = data
        return cls(late, square, dict(untouched), culprit, WrittenGradients.decode(written), *rest)


class TensorFacts(NamedTuple):
    """One parameter or buffer of a model."""

    name: str
    shape: Sequence[int]
    dtype: str
    trained: bool

    def __str__(self) -> str:
        trained = "trained" if self.trained else "not trained"
        return f"'{self.name}' of shape {list(self.shape)}, {self.dtype}, {trained}"


@dataclass(frozen=True)
class ModelFacts:
    """One rank's model: its parameters by unit and its buffers, and the first of them on the meta device, if any."""

    tensors: Sequence[TensorFacts]
    on_meta: str | None

    def encode(self) -> list[Any]:
        """Plain data."""
        return [list(self.tensors), self.on_meta]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> ModelFacts:
        """The message that `encode` made ``data`` of."""
        tensors, on_meta = data
        return cls([TensorFacts(*tensor) for tensor in tensors], on_meta)
