"""Decide how to shard a model before anything is sharded: options, units, layouts and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero_comm import Codec, Control, Message
from zero_precision import PrecisionPolicy, kept_in_fp32

from .errors import PartitionError
from .external import leaf_marker
from .layout import UnitLayout
from .messages import ModelFacts, TensorFacts, decode_each
from .scripted import report_by_enclosing_modules
from .units import UnitLimits, UnitPlan, plan_units


@dataclass(frozen=True)
class PartitionOptions:
    """How to shard a model, and when to gather and reduce it; sizes in elements.

    ``policy``: the dtypes. ``limits``: bounds of its units. ``stage``: optimizer state is sharded when >=
    1, gradients when >= 2, parameters when >= 3. At stages 0 and 1 the backward passes of one step add up locally
    before they are reduced; with ``reduce_each_micro_batch`` they are reduced one by one as at stages 2 and 3, which
    makes all stages bitwise equal. ``prefetch_numel``: elements in flight ahead of their use at most;
    ``max_live_numel``: gathered elements at most; ``bucket_numel``: elements of gradients in flight at most. Whatever
    these bounds, the unit after the one in use is gathered ahead (not if ``prefetch_numel`` is 0), and one reduction is
    in flight. ``compute_dtypes``: by parameter name, exceptions from the policy's dtype at stage 3. ``alignment``:
    shard boundaries are multiples of it in units with enough elements; ``entry_alignment``: shard boundaries and the
    offsets of parameters are always multiples of it, as block-wise states need. ``is_leaf``: whether a module (by name)
    is gathered together with its children whatever its size. ``weight_codec``, ``frozen_codec``: quantize the gathers
    of trained and of frozen units at stage 3; units that are never released are not quantized. ``virtual_ranks``:
    number of micro-batches in a step, a power of two, for the same bits at any number of ranks that divides it
    (leaves.py); 0 for off. It needs a reduction that sums along a tree, and an ``entry_alignment`` that is a multiple
    of `GRID`. ``keeps_float64``: parameters that the model holds in float64 stay so, whatever the policy says.
    """

    stage: int
    policy: PrecisionPolicy
    limits: UnitLimits = field(default_factory=UnitLimits)
    prefetch_numel: int = 50_000_000
    max_live_numel: int = 1_000_000_000
    bucket_numel: int = 500_000_000
    reduce_each_micro_batch: bool = False
    compute_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    alignment: int = 64
    entry_alignment: int = 1
    is_leaf: Callable[[str, nn.Module], bool] = field(default_factory=leaf_marker)
    weight_codec: Codec | None = None
    frozen_codec: Codec | None = None
    virtual_ranks: int = 0
    keeps_float64: bool = False

    @property
    def reduces_each(self) -> bool:
        """True if every backward pass reduces its gradients; else only the last one before a step does."""
        return self.stage >= 2 or self.reduce_each_micro_batch or self.virtual_ranks > 0


def kept_fp32(model: nn.Module, policy: PrecisionPolicy) -> frozenset[str]:
    """Return the names of parameters and buffers that stay in float32 in a model trained in half precision.

    They are the policy's choice and those of layers with running statistics, as bfloat16 is too coarse for running
    averages. Empty if the policy's dtype has 32 bits or more.
    """
    if policy.param_dtype.itemsize >= 4:
        return frozenset()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, _NormBase) and m.track_running_stats}
    tensors = (f"{n}.{key}" if n else key for n, m in layers.items() for key in (*m._parameters, *m._buffers))
    return kept_in_fp32(model, policy) | frozenset(tensors)


def plan_sharding(
    model: nn.Module, options: PartitionOptions, trainable: set[int] | None, kept: frozenset[str]
) -> list[UnitPlan]:
    """Return the units of ``model`` in module order.

    ``trainable``: ids of the parameters to train, None for all; those that require no gradients are never trained.
    ``kept``: names of the parameters that stay in float32. Raises `PartitionError` at stage 3 for a model that is
    itself a torch.jit module.
    """
    policy = options.policy

    def is_trained(parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` requires a gradient and is among ``trainable``, if that is given."""
        return parameter.requires_grad and (trainable is None or id(parameter) in trainable)

    def dtype_of(name: str, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the parameter called ``name`` computes.

        That is float32 if it is kept so; its own float64 if that is kept; its own if it is frozen and narrower than the
        policy's; else the policy's or, at stage 3, the exception for its name.
        """
        if name in kept:
            return torch.float32
        if options.keeps_float64 and parameter.dtype == torch.float64:
            return torch.float64
        if not is_trained(parameter) and parameter.dtype.itemsize < policy.param_dtype.itemsize:
            return parameter.dtype
        return options.compute_dtypes.get(name, policy.param_dtype) if options.stage >= 3 else policy.param_dtype

    plans = plan_units(model, options.limits, trainable=is_trained, dtype_of=dtype_of, is_leaf=options.is_leaf)
    report_by_enclosing_modules(model, plans, released=options.stage >= 3)
    return plans


def unit_layout(plan: UnitPlan, world_size: int, options: PartitionOptions) -> UnitLayout:
    """Return the layout of a planned unit's parameters in its flat buffer, sharded over ``world_size`` ranks.

    Shard boundaries are multiples of ``options.alignment`` only if every rank gets that many elements.
    """
    total = sum(math.prod(p.shape) for p in plan.parameters.values())
    blocks = options.entry_alignment
    wished = math.lcm(options.alignment, blocks)
    align = wished if total >= wished * world_size else blocks
    shapes = {name: tuple(p.shape) for name, p in plan.parameters.items()}
    return UnitLayout.from_shapes(plan.name, shapes, world_size, align, entry_alignment=blocks)


def update_dtype(plan: UnitPlan, policy: PrecisionPolicy) -> torch.dtype:
    """Return the dtype of a planned unit's masters: the policy's, or the unit's own if it is frozen or wider than the
    policy's parameter dtype."""
    if not plan.trainable or plan.dtype.itemsize > policy.param_dtype.itemsize:
        return plan.dtype
    return policy.update_dtype


def agree_on_model(model: nn.Module, plans: list[UnitPlan], control: Control) -> None:
    """Check that all ranks have the same model and that it has values. Collective.

    ``plans``: the model's units. Raises `PartitionError` on every rank that names the first difference in names,
    shapes, dtypes or which parameters are trained, or the first tensor on the meta device.
    """
    mine = [
        TensorFacts(name, list(p.shape), str(p.dtype), plan.trainable)
        for plan in plans
        for name, p in plan.parameters.items()
    ]
    mine += [TensorFacts(name, list(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
    meta = next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta), None)
    answers = control.agree(Message("partition", "the model", 0, ModelFacts(mine, meta).encode()))
    models = decode_each(ModelFacts.decode, answers)
    _refuse_meta([one.on_meta for one in models])
    for rank, one in enumerate(models):
        if one.tensors != models[0].tensors:
            difference = _first_difference(models[0].tensors, one.tensors)
            raise PartitionError(
                f"rank 0 and rank {rank} have different models: {difference}. Build the same model on every rank."
            )


def _refuse_meta(names: list[str | None]) -> None:
    """Raise `PartitionError` for the first rank with a tensor on the meta device.

    ``names``: by rank, its first parameter or buffer on the meta device, None for none.
    """
    for rank, name in enumerate(names):
        if name is not None:
            raise PartitionError(
                f"'{name}' is on the meta device on rank {rank} and has no values. Build the model inside "
                "`with Init(config=...):`, where every rank keeps its share of each parameter as soon as it is drawn; "
                "or give this one its memory and values there: "
                '`with Init(config=...): model.to_empty(device="cpu"); model.apply(initialise)`.'
            )


def _first_difference(expected: Sequence[TensorFacts], got: Sequence[TensorFacts]) -> str:
    """Return a phrase for an error message: the first difference between two models that differ.

    ``expected``, ``got``: the facts of each one's parameters and buffers, in order.
    """
    for ours, theirs in zip(expected, got, strict=False):
        if ours != theirs:
            return f"one has {ours} where the other has {theirs}"
    return f"one has {len(expected)} parameters and buffers, the other {len(got)}"
