"""Say what a training run needs, before it runs: memory by tier, bytes by link, operations, the resource that binds.

Nothing here imports torch, except `count_parameters` when it is given a model, `plan` and `fits`. Read `states.py`
first.
"""

from __future__ import annotations

from . import infinity
from .activations import activation_bytes, block_activation_bytes, loss_bytes, working_bytes
from .bounding import step_bounds
from .comparing import ComparedRow, compare
from .dry import plan, plan_script
from .errors import PlanError
from .estimate import Fit, StepEstimate, estimate_step
from .estimators import Estimate, EstimateRow, estimate_zero1, estimate_zero2, estimate_zero3
from .fitting import FitAnswer, fits
from .limits import Bound, StepTime, Wear, bounds, step_time, wear
from .live import ParameterCount, count_parameters, estimate_zero1_live, estimate_zero2_live, estimate_zero3_live
from .machine import Machine, Value, load_machine, parse_machine, presets
from .planned import FileRow, HeldRow, LiveRow, Peak, Plan, RankPlan, SentRow
from .scripts import Script, ScriptPlan
from .search import Choice, EstimatedChoice, Rejected, Search, configuration, search
from .setup import Setup, StateBytes
from .states import StateRow, by_tier, largest_model, model_states, model_states_per_rank
from .traffic import Collective, LinkBytes, TierBytes, collectives, link_bytes, tier_bytes
from .transformer import CHECKPOINTING, Transformer, forward_flops, step_flops

__version__ = "0.1.0"
__all__ = [
    "Bound",
    "CHECKPOINTING",
    "Choice",
    "Collective",
    "ComparedRow",
    "Estimate",
    "EstimateRow",
    "EstimatedChoice",
    "FileRow",
    "Fit",
    "FitAnswer",
    "HeldRow",
    "LinkBytes",
    "LiveRow",
    "Machine",
    "ParameterCount",
    "Peak",
    "Plan",
    "PlanError",
    "RankPlan",
    "Rejected",
    "Script",
    "ScriptPlan",
    "Search",
    "SentRow",
    "Setup",
    "StateBytes",
    "StateRow",
    "StepEstimate",
    "StepTime",
    "TierBytes",
    "Transformer",
    "Value",
    "Wear",
    "activation_bytes",
    "block_activation_bytes",
    "bounds",
    "by_tier",
    "collectives",
    "compare",
    "configuration",
    "count_parameters",
    "estimate_step",
    "estimate_zero1",
    "estimate_zero1_live",
    "estimate_zero2",
    "estimate_zero2_live",
    "estimate_zero3",
    "estimate_zero3_live",
    "fits",
    "forward_flops",
    "infinity",
    "largest_model",
    "link_bytes",
    "load_machine",
    "loss_bytes",
    "model_states",
    "model_states_per_rank",
    "parse_machine",
    "plan",
    "plan_script",
    "presets",
    "search",
    "step_bounds",
    "step_flops",
    "step_time",
    "tier_bytes",
    "wear",
    "working_bytes",
]
