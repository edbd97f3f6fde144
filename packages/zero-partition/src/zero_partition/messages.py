"""Messages that the ranks of one engine exchange.

Each message is a frozen dataclass. `encode` returns it as plain data, which is sent as JSON, and `decode` makes the
message from what another rank's `encode` returned. Units are named by their indices, parameters by their number: the
index in their unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

Edits = dict[str, str]
"""By ``"unit.number"`` of a parameter: a digest of the values that user code gave it, or ``"!"`` and the reason why it
is refused."""


def distinct(told: Iterable[_T]) -> list[_T]:
    """Return what the ranks told, ``told`` in rank order, each object once.

    Ranks that sent the same share one object (see `ControlGroup.exchange`), so thousands of them take no longer than a
    few.
    """
    told = tuple(told)
    return list(dict(zip(map(id, told), told, strict=True)).values())


def decode_each(decode: Callable[[Any], _T], told: Sequence[Any]) -> list[_T]:
    """Return ``decode(data)`` for what each rank told, ``told`` in rank order. ``decode`` is called once for each
    object, as ranks that sent the same share one."""
    decoded = {id(data): decode(data) for data in distinct(told)}
    return list(map(decoded.__getitem__, map(id, told)))


@dataclass
class StepNumber:
    """The number of the current step, which every message and every collective of an engine carries."""

    value: int = 0


class Completion(NamedTuple):
    """A unit whose gradients are complete, and the number of units that this rank had used in the pass by then."""

    unit: int
    gathers: int


@dataclass(frozen=True)
class ReductionsSeen:
    """One rank's observations of its last backward pass, from which the order of reductions is learned.

    ``completions``: in the order in which units became complete. ``gathered``: the units that the rank used, in order
    of first use. ``steady``: every unit had as many gradients as in the pass before.
    """

    completions: Sequence[Completion]
    gathered: Sequence[int]
    steady: bool

    def encode(self) -> dict[str, Any]:
        """Return the message as plain data (a dict), for `decode`."""
        return {"finished": list(self.completions), "used": list(self.gathered), "steady": self.steady}

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> ReductionsSeen:
        """Return the message that `encode` turned into ``data``."""
        return cls([Completion(*pair) for pair in data["finished"]], data["used"], data["steady"])


@dataclass(frozen=True)
class Observations:
    """One rank's news for the others, which every message carries whatever it is about.

    ``gathers``: by pass, the units in order of first use, for passes that did not follow a learned order.
    ``reductions``: observations of its last backward pass, until the order of reductions is settled. ``changed``: units
    whose shard this rank alone has written. ``edits``: parameters that user code has changed. ``discards``: a digest of
    the averaged gradients that were discarded since the last step.
    """

    gathers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    reductions: ReductionsSeen | None = None
    changed: Sequence[int] = field(default_factory=list)
    edits: Edits = field(default_factory=dict)
    discards: int = 0

    def encode(self) -> list[Any]:
        """Return the fields, in their order, as plain data for `decode`; the reductions encoded, or None."""
        reductions = None if self.reductions is None else self.reductions.encode()
        return [dict(self.gathers), reductions, list(self.changed), self.edits, self.discards]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> Observations:
        """Return the message that `encode` turned into ``data``."""
        gathers, reductions, changed, edits, discards = data
        seen = None if reductions is None else ReductionsSeen.decode(reductions)
        return cls(gathers, seen, changed, edits, discards)


@dataclass(frozen=True)
class LockStep:
    """A rank's progress in a backward pass whose order of reductions is not known yet, and what it waits for.

    ``gather``: position in the pass's order of the gather that the rank is about to wait for; -1 for none. ``issued``:
    number of gathers issued. ``started``: number of reductions started. ``done``: the rank has all its gradients.
    """

    gather: int
    issued: int
    started: int
    done: bool

    def encode(self) -> list[Any]:
        """Return the fields, in their order, as plain data for `decode`."""
        return [self.gather, self.issued, self.started, self.done]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> LockStep:
        """Return the message that `encode` turned into ``data``."""
        return cls(*data)


@dataclass(frozen=True)
class PassProgress:
    """The numbers of gathers and reductions that one rank had issued in a pass when it failed."""

    gathers: int
    reductions: int

    def encode(self) -> list[int]:
        """Return both numbers, in their order, as plain data for `decode`."""
        return [self.gathers, self.reductions]

    @classmethod
    def decode(cls, data: Sequence[int]) -> PassProgress:
        """Return the message that `encode` turned into ``data``."""
        return cls(*data)


@dataclass(frozen=True)
class TrainingPosition:
    """One rank's position in training when a failure ended the process groups.

    ``interrupted``: what was writing weights or states at that moment, None for nothing. ``steps``, ``micro_steps``,
    ``samples``: the counts of its training loop.
    """

    interrupted: str | None
    steps: int
    micro_steps: int
    samples: int

    def encode(self) -> list[Any]:
        """Return the fields, in their order, as plain data for `decode`."""
        return [self.interrupted, self.steps, self.micro_steps, self.samples]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> TrainingPosition:
        """Return the message that `encode` turned into ``data``."""
        return cls(*data)


@dataclass(frozen=True)
class WrittenGradients:
    """The gradients that one rank's user code has written since the last step.

    ``written``: by unit, the numbers of the parameters whose ``.grad`` was assigned, edited or set to None.
    ``edited``: by unit, a digest of the averaged gradients after in-place changes (stage 0).
    """

    written: Mapping[int, Sequence[int]] = field(default_factory=dict)
    edited: Mapping[int, int] = field(default_factory=dict)

    def encode(self) -> list[Any]:
        """Return both maps as lists of pairs, plain data for `decode`; an empty list if nothing was written."""
        return [list(self.written.items()), list(self.edited.items())] if self.written or self.edited else []

    @classmethod
    def decode(cls, data: Sequence[Any]) -> WrittenGradients:
        """Return the message that `encode` turned into ``data``."""
        return cls(*map(dict, data))


@dataclass(frozen=True)
class StepReport:
    """One rank's facts about the gradients of a step.

    ``late``: units with gradients that no reduction has taken. ``square``: the sum of squares of its shards' gradients,
    as `NormSums.pack` returns it. ``untouched``: by unit, the numbers of the parameters that had no gradient.
    ``culprit``: name of the first parameter with a gradient that is not finite; "" if all are finite. ``written``:
    gradients that user code has written. ``hooked``: the user has optimizer hooks that run before the arithmetic, and
    may fail. ``hyperparameters``: a digest of the param groups' hyperparameters. ``defers``: this rank can take the
    step before its host knows the norm. ``earlier``: the sum of squares over all ranks of the step before, if that was
    taken so and the sum has arrived here; else None. ``added``: a digest of the parameters that came into the model
    after it was sharded; 0 for none. ``frozen``: a digest of the names of the trained parameters that
    require no gradient now; 0 for none.
    """

    late: Sequence[int]
    square: Any
    untouched: Mapping[int, Sequence[int]]
    culprit: str
    written: WrittenGradients
    hooked: bool
    hyperparameters: int
    defers: bool = False
    earlier: float | None = None
    added: int = 0
    frozen: int = 0

    def encode(self) -> list[Any]:
        """Return the fields, in their order, as plain data for `decode`; those at the end that have their defaults are
        left out."""
        untouched = list(self.untouched.items())
        told = [list(self.late), self.square, untouched, self.culprit, self.written.encode()]
        rest, defaults = [self.defers, self.earlier, self.added, self.frozen], [False, None, 0, 0]
        while rest and rest[-1] == defaults[len(rest) - 1]:
            rest.pop()
        return [*told, self.hooked, self.hyperparameters, *rest]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> StepReport:
        """Return the message that `encode` turned into ``data``; fields that it left out have their defaults."""
        late, square, untouched, culprit, written, *rest = data
        return cls(late, square, dict(untouched), culprit, WrittenGradients.decode(written), *rest)


class TensorFacts(NamedTuple):
    """Description of one parameter or buffer of a model, to compare ranks by."""

    name: str
    shape: Sequence[int]
    dtype: str
    trained: bool

    def __str__(self) -> str:
        """Return the description in words, for errors: "'layers.0.weight' of shape [4, 4], torch.float32, trained"."""
        trained = "trained" if self.trained else "not trained"
        return f"'{self.name}' of shape {list(self.shape)}, {self.dtype}, {trained}"


@dataclass(frozen=True)
class ModelFacts:
    """Description of one rank's model.

    ``tensors``: its parameters, unit by unit, and its buffers. ``on_meta``: name of the first one on the meta device.
    """

    tensors: Sequence[TensorFacts]
    on_meta: str | None

    def encode(self) -> list[Any]:
        """Return both fields as plain data for `decode`."""
        return [list(self.tensors), self.on_meta]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> ModelFacts:
        """Return the message that `encode` turned into ``data``."""
        tensors, on_meta = data
        return cls([TensorFacts(*tensor) for tensor in tensors], on_meta)
