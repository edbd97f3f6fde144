"""Training scripts of well-known methods, each written once and run with plain torch and with the engine.

A script is a function of a `Workbench`, which makes trainers, hands out batches and collects the values to compare. The
scripts do what such scripts do: touch weights, gradients and optimizers directly.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import script_gradients
import script_modules
import script_weights
import torch
from script_bench import Workbench

SCRIPTS = {**script_weights.script, **script_gradients.script, **script_modules.script}


def run_plain(name: str) -> dict[str, torch.Tensor]:
    """What the script computes with plain torch, on the batch of all ranks."""
    bench = Workbench(plain=True)
    SCRIPTS[name](bench)
    return bench.values


@dataclass(frozen=True)
class Outcome:
    """How a script ended on a rank: what was ``refused``, what it was ``told`` by a warning, and its ``values``."""

    refused: str
    told: str
    values: dict[str, torch.Tensor]


def run_sharded(name: str, stage: int, tier: str, unit_min: int, dtype: torch.dtype = torch.float64) -> Outcome:
    """Run the script with the engine on this rank."""
    bench = Workbench(plain=False, stage=stage, dtype=dtype, tier=tier, unit_min=unit_min)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            SCRIPTS[name](bench)
        except Exception as refusal:  # the caller judges it
            return Outcome(f"{type(refusal).__name__}: {refusal}", "", {})
    bench.close()
    told = next((str(w.message) for w in caught if "p.grad of parameter" in str(w.message)), "")
    return Outcome("", told, bench.values)
