"""Decide which rank owns which bytes, and unshard them when a module computes.

Read `layout.py` first, then `unit.py`, `gatherer.py`, `reducer.py` and `passes.py`.
"""

from __future__ import annotations

from .access import (
    full_gradient,
    full_parameter,
    full_state,
    set_full_gradient,
    set_full_parameter,
    set_full_state,
)
from .data_watch import change_class, present_class
from .dtype_hints import naming_dtypes
from .errors import EditRefusedError, NonFiniteGradientError, PartitionError, ReleasedParameterError
from .external import leaf_marker, register_external_parameter, set_leaf_modules, unregister_external_parameter
from .full_state_dict import full_state_dict
from .full_weights import BUCKET_BYTES, FullWeights
from .gathered_blocks import gathered, gathered_anywhere
from .gradients import UnitGradients
from .host_facts import storage_address
from .initialisation import Init
from .layout import Fragment, Layout, LayoutEntry, UnitLayout, element_positions
from .leaves import LeafTree
from .live import UnitState
from .model_parts import ModelParts, TensorParallelModel, UnsplitModel
from .needs import AveragingOptimizer, NormOptimizer, refuse_on_tier
from .norm import GRID, GridSquares, NormSquared, grid_squares, norm_squared
from .optimizer import ShardedOptimizer
from .partition import Partition, owner_of, partition
from .planning import PartitionOptions
from .residency import DeviceResidency, Residency
from .sharded_parameter import NewShard, ShardedParameter, sharded_record
from .step_result import StepResult
from .tier import MakeStates, ShardNeeds, StateTier
from .tiling import TiledLinear
from .unit import Unit
from .units import UnitLimits, UnitPlan, plan_units
from .updates import OwnedFragment, start_in_reduced
from .wrappers import register_unless_wrapper

__all__ = [
    "AveragingOptimizer",
    "BUCKET_BYTES",
    "DeviceResidency",
    "EditRefusedError",
    "Fragment",
    "FullWeights",
    "GRID",
    "GridSquares",
    "Init",
    "Layout",
    "LayoutEntry",
    "LeafTree",
    "MakeStates",
    "ModelParts",
    "NewShard",
    "NonFiniteGradientError",
    "NormOptimizer",
    "NormSquared",
    "OwnedFragment",
    "Partition",
    "PartitionError",
    "PartitionOptions",
    "ReleasedParameterError",
    "Residency",
    "ShardNeeds",
    "ShardedOptimizer",
    "ShardedParameter",
    "StateTier",
    "StepResult",
    "TensorParallelModel",
    "TiledLinear",
    "Unit",
    "UnitGradients",
    "UnitLayout",
    "UnitLimits",
    "UnitPlan",
    "UnitState",
    "UnsplitModel",
    "change_class",
    "element_positions",
    "full_gradient",
    "full_parameter",
    "full_state",
    "full_state_dict",
    "gathered",
    "gathered_anywhere",
    "grid_squares",
    "leaf_marker",
    "naming_dtypes",
    "norm_squared",
    "owner_of",
    "partition",
    "plan_units",
    "present_class",
    "refuse_on_tier",
    "register_external_parameter",
    "register_unless_wrapper",
    "set_full_gradient",
    "set_full_parameter",
    "set_full_state",
    "set_leaf_modules",
    "sharded_record",
    "start_in_reduced",
    "storage_address",
    "unregister_external_parameter",
]
