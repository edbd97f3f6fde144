"""The identity of a collective, carried into the ledger and into every error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["gather", "reduce", "publish", "broadcast", "control", "checkpoint"]


@dataclass(frozen=True)
class Tag:
    """Names one collective: what it does, for which unit or parameter, in which optimizer step.

    The group that carries it adds its own running number, so that two ranks can tell whether they are at the same
    point.
    """

    phase: Phase
    name: str
    step: int = 0

    def __str__(self) -> str:
        return f"{self.phase} of '{self.name}' in step {self.step}"
