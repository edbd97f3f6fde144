"""Training scripts of well-known methods, each written once and run with plain torch and with the engine.

A script is a function of a `Workbench`, which makes trainers, hands out batches and collects the values to compare. The
scripts do what such scripts do: touch weights, gradients and optimizers directly.
"""

from __future__ import annotations

from dataclasses import dataclass

import script_fragments
import script_gradients
import script_modules
import script_optimizers
import script_states
import script_weights
import torch
from script_bench import Workbench

SCRIPTS = {
    **script_weights.script,
    **script_gradients.script,
    **script_modules.script,
    **script_optimizers.script,
    **script_fragments.script,
    **script_states.script,
}


def run_plain(name: str) -> dict[str, torch.Tensor]:
    """What the script computes with plain torch, on the batch of all ranks."""
    bench = Workbench(plain=True)
    SCRIPTS[name](bench)
    return bench.values


@dataclass(frozen=True)
class Outcome:
    """How a script ended on a rank: what was ``refused``, and its ``values``."""

    refused: str
    values: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Where:
    """Where scripts run; ``tier``: "device", "cpu", or "nvme", which takes ``folder``."""

    stage: int
    tier: str = "device"
    unit_min: int = 1
    dtype: torch.dtype = torch.float64
    folder: str = ""


def run_sharded(name: str, where: Where) -> Outcome:
    """Run the script with the engine on this rank."""
    bench = Workbench(
        plain=False,
        stage=where.stage,
        dtype=where.dtype,
        tier=where.tier,
        unit_min=where.unit_min,
        folder=where.folder,
    )
    try:
        SCRIPTS[name](bench)
    except Exception as refusal:  # the caller judges it
        return Outcome(f"{type(refusal).__name__}: {refusal}", {})
    bench.close()
    return Outcome("", bench.values)
