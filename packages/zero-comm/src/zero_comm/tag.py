"""The identity of a collective, carried into the ledger and into every error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NO_STEP = -1
"""The step of a collective whose caller counts none."""
Phase = Literal["gather", "reduce", "publish", "broadcast", "control", "checkpoint", "exchange"]


@dataclass(frozen=True)
class Tag:
    """Names one collective: its phase, the unit or parameter (``name``), and the optimizer step (or `NO_STEP`).

    The flight recorder adds a running number per group, so that two ranks' entries can be compared.
    """

    phase: Phase
    name: str
    step: int = 0

    def __str__(self) -> str:
        """Return the tag in words, for errors: "gather of 'layers.0' in step 3"."""
        return f"{self.phase} of '{self.name}'{in_step(self.step)}"


def in_step(step: int) -> str:
    """Return ``step`` as messages end with it: " in step 3"; an empty text for `NO_STEP`."""
    return "" if step == NO_STEP else f" in step {step}"
