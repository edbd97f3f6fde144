"""The identity of a collective, carried into the ledger and into every error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["gather", "reduce", "publish", "broadcast", "control", "checkpoint", "exchange"]


@dataclass(frozen=True)
class Tag:
    """Names one collective: its phase, the unit or parameter (``name``), and the optimizer step.

    The flight recorder adds a running number per group, so that two ranks' entries can be compared.
    """

    phase: Phase
    name: str
    step: int = 0

    def __str__(self) -> str:
        return f"{self.phase} of '{self.name}' in step {self.step}"
