"""How much memory a model's states will take, before anything is bought, started or, for the cold forms, even imported.

Nothing here imports torch; the live forms take a model that exists, also one on the meta device. Read `model_states.py`
first: the published formula. `offload.py` is the planning table with offload and buffers.
"""

from __future__ import annotations

from zero_core.estimate.command import add_estimate_command
from zero_core.estimate.live import (
    ParameterCount,
    count_parameters,
    estimate_zero1_live,
    estimate_zero2_live,
    estimate_zero3_live,
)
from zero_core.estimate.model_states import model_states_per_rank
from zero_core.estimate.offload import Estimate, EstimateRow, estimate_zero1, estimate_zero2, estimate_zero3

__all__ = [
    "Estimate",
    "EstimateRow",
    "ParameterCount",
    "add_estimate_command",
    "count_parameters",
    "estimate_zero1",
    "estimate_zero1_live",
    "estimate_zero2",
    "estimate_zero2_live",
    "estimate_zero3",
    "estimate_zero3_live",
    "model_states_per_rank",
]
