"""Read and replace full parameters, gradients and optimizer states for the user, outside a pass.

Private functions name a parameter by its unit and its ``index`` there, its position in the unit's lists (`Unit.names`,
`Unit.parameters`). ``partition`` is the sharded model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zero_comm import Tag

from .errors import PartitionError
from .live import UnitState
from .optimizer import ShardedOptimizer
from .partition import Partition
from .planning import update_dtype
from .tier import StateTier
from .unit import Unit
from .updates import OwnedFragment
from .whole_parameters import explain_missing, is_whole, set_whole


def full_parameter(partition: Partition, parameter: nn.Parameter) -> torch.Tensor:
    """Return a full copy of the parameter's weights as the optimizer has them, in its shape. Collective, except for a
    parameter that no unit holds (`is_whole`).

    The copy has the master's dtype, float32 for half-precision weights on a tier; without a master the weights' own.
    Waits for updates that still run, and puts weights that user code has changed into the masters. Raises
    `PartitionError` for a parameter of another model.
    """
    partition.runtime.reopen("full_param")
    if is_whole(partition, parameter):
        return parameter.detach().clone()
    unit, index = _find_unit(partition, parameter)
    partition.runtime.agree("full parameter", unit.names[index], None)
    partition.finish_updates()
    partition.runtime.edits.settle_masters([unit])
    if unit.master is not None:
        return _gather_full(partition, unit, index, unit.master)
    full = _gather_full(partition, unit, index, unit.acquire_shard())
    partition.residency.release(unit.name, dirty=False)
    if unit.states is not None and unit.plan.dtype.itemsize < 4:
        return _gather_full_from_tier(partition, unit, unit.states, index, "master", full)
    return full


def full_gradient(partition: Partition, parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a full copy of the parameter's averaged gradient, in its shape; None if no rank has a gradient of it since
    the last step.

    The copy has the accumulate dtype and contains the loss scale. Gradients that came too late for their reduction are
    reduced first. Collective. Raises `PartitionError` for a parameter that no unit holds.
    """
    partition.runtime.reopen("full_grad")
    unit, index = _find_unit(partition, parameter)
    partition.runtime.held_gradients.flush()
    gradients = partition.runtime.gradients.get(unit.index)
    touched = partition.runtime.agree(
        "full gradient", unit.names[index], gradients is not None and gradients.touched[index]
    )
    if gradients is None or not gradients.is_reduced or not any(touched):
        return None
    with gradients.averaged() as averaged:
        return _gather_full(partition, unit, index, averaged.to(partition.device))


def full_state(partition: Partition, optimizer: ShardedOptimizer, parameter: nn.Parameter, key: str) -> torch.Tensor:
    """Return a full copy of the optimizer's state ``key`` (for Adam ``exp_avg``, ``exp_avg_sq``) of one parameter, in
    its shape.

    Zeros for any ``key`` while the parameter has no states, as before the first step. Waits for updates that a tier
    still runs. Collective. Raises `PartitionError` for a parameter that is not trained, and for a key that is not among
    its states with a value per element.
    """
    partition.runtime.reopen("full_state")
    unit, index = _find_unit(partition, parameter)
    if not unit.plan.trainable:
        raise PartitionError(f"parameter '{unit.names[index]}' is not trained and has no optimizer state")
    if unit.states is not None:
        mine = unit.layout.fragment_of(unit.layout.entries[index], partition.rank)
        kinds = list(unit.states.kinds(unit.names[index])) if mine is not None else []
        _check_key(unit, index, key, partition.runtime.agree("full state", f"{unit.names[index]}.{key}", kinds))
        partition.finish_updates()
        zeros = torch.zeros(unit.layout.entries[index].shape, device=partition.device)
        return _gather_full_from_tier(partition, unit, unit.states, index, key, zeros)
    held = _owned_fragments(optimizer, unit, index)
    pieces = [(o, state) for o in held if (state := _elementwise_state(optimizer, o, key)) is not None]
    entry = unit.layout.entries[index]
    has_full = any(o.fragment.length == entry.numel for o, _ in pieces)
    keys = [k for o in held for k in optimizer.state_of(o) if _elementwise_state(optimizer, o, k) is not None]
    everyones = partition.runtime.agree("full state", f"{entry.name}.{key}", [has_full, sorted(set(keys))])
    _check_key(unit, index, key, [names for _, names in everyones])
    answers = [one for one, _ in everyones]
    if any(answers):
        full = torch.empty(
            entry.numel, dtype=update_dtype(unit.plan, partition.options.policy), device=partition.device
        )
        if has_full:
            full.copy_(pieces[0][1].flatten())
        tag = Tag("broadcast", entry.name, partition.runtime.step)
        partition.groups.broadcast(full, answers.index(True), tag)
        return full.view(entry.shape)
    values = torch.zeros_like(unit.master if unit.master is not None else unit.flat)
    for owned, state in pieces:
        values[owned.reduced_start : owned.reduced_start + owned.fragment.length].copy_(state)
    return _gather_full(partition, unit, index, values)


def set_full_parameter(partition: Partition, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter's weights, masters included, by rank 0's ``value``. Collective.

    Other ranks pass any tensor of the parameter's shape. Inside `gathered` the block has the new values, too. Waits for
    updates that still run. Raises `PartitionError` on every rank if one passes another shape, and for a parameter of
    another model.
    """
    partition.runtime.reopen("set_full_param")
    if is_whole(partition, parameter):
        set_whole(partition, parameter, value)
        partition.runtime.weight_passes.end("set_full_param has changed weights")
        return
    unit, index = _find_unit(partition, parameter)
    flat = _broadcast_value(partition, unit, index, "parameter", value)
    partition.readers.wait()
    with torch.no_grad(), partition.runtime.writing("set_full_param", weights=True):
        checksums = unit.edits.checksums
        if unit.master is not None:
            _write_full_values(partition, unit, index, unit.master, flat)
        elif unit.states is not None:
            _write_to_tier(partition, unit, unit.states, index, "master", flat)
        _write_full_values(partition, unit, index, unit.borrow_shard(), flat)
        unit.give_back_shard()
        if unit.state is UnitState.GATHERED:
            _write_full_values(partition, unit, index, unit.flat, flat)
            if checksums is not None:  # which `gathered` has taken
                unit.edits.renew_checksum(checksums, index, unit.views)


def set_full_gradient(partition: Partition, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter's averaged gradient by rank 0's ``value``; other ranks pass any tensor of that shape.
    Collective.

    Gradients that came too late for their reduction are reduced first; from then on the parameter counts as one that
    has a gradient. Raises `PartitionError` on every rank if one passes another shape, when no backward pass has reached
    its unit since the last step, and for a parameter that no unit holds.
    """
    partition.runtime.reopen("set_full_grad")
    unit, index = _find_unit(partition, parameter)
    partition.runtime.held_gradients.flush()
    gradients = partition.runtime.gradients.get(unit.index)
    if gradients is None or not gradients.is_reduced:
        raise PartitionError(f"parameter '{unit.names[index]}' has no gradient to replace; run backward first")
    flat = _broadcast_value(partition, unit, index, "gradient", value)
    with gradients.averaged(dirty=True) as averaged:
        _write_full_values(partition, unit, index, averaged, flat)
    gradients.touched[index] = True
    partition.runtime.user_gradients.refresh()


def set_full_state(
    partition: Partition, optimizer: ShardedOptimizer, parameter: nn.Parameter, key: str, value: torch.Tensor
) -> None:
    """Replace the optimizer's state ``key`` of a parameter by rank 0's ``value`` (the full state); other ranks pass any
    tensor of that shape. Collective.

    Waits for updates that still run. Raises `PartitionError` on every rank if one rank has a value of another shape or
    the optimizer has no such state yet, and for a parameter that is not trained.
    """
    partition.runtime.reopen("set_full_state")
    unit, index = _find_unit(partition, parameter)
    missing = _why_no_state(partition, optimizer, unit, index, key)
    flat = _broadcast_value(partition, unit, index, f"state '{key}'", value, missing)
    partition.readers.wait()
    with partition.runtime.writing("set_full_state"):
        if unit.states is not None:
            _write_to_tier(partition, unit, unit.states, index, key, flat)
            return
        for owned in _owned_fragments(optimizer, unit, index):
            state = _elementwise_state(optimizer, owned, key)
            if state is not None:
                start = owned.fragment.param_offset
                state.view(-1).copy_(flat[start : start + owned.fragment.length])


def _why_no_state(partition: Partition, optimizer: ShardedOptimizer, unit: Unit, index: int, key: str) -> str | None:
    """Return, as an error's text, why this rank has no state ``key`` for its fragments of parameter ``index`` of
    ``unit``; None if it has one, or holds no fragment."""
    name = unit.names[index]
    if not unit.plan.trainable:
        return f"parameter '{name}' is not trained and has no optimizer state"
    if unit.states is not None:
        here = unit.layout.fragment_of(unit.layout.entries[index], partition.rank) is not None
        if here and key not in unit.states.kinds(name):
            return f"parameter '{name}' has no optimizer state '{key}'"
    elif any(_elementwise_state(optimizer, owned, key) is None for owned in _owned_fragments(optimizer, unit, index)):
        return f"parameter '{name}' has no optimizer state '{key}' yet; take a step first"
    return None


def _owned_fragments(optimizer: ShardedOptimizer, unit: Unit, index: int) -> list[OwnedFragment]:
    """Return the fragments of parameter ``index`` of ``unit`` that this rank's ``optimizer`` updates."""
    return [owned for owned in optimizer.fragments if owned.unit is unit and owned.number == index]


def _gather_full_from_tier(
    partition: Partition, unit: Unit, states: StateTier, index: int, kind: str, default: torch.Tensor
) -> torch.Tensor:
    """Return the full ``kind`` ("master" or the name of a state) of parameter ``index`` of ``unit`` from the ranks'
    tiers, in its shape. Collective.

    ``states``: this rank's tier. ``default``: the full tensor that gives the elements of which no tier keeps the kind.
    """
    entry = unit.layout.entries[index]
    wide = torch.promote_types(unit.plan.dtype, torch.float32)
    values = torch.zeros(unit.layout.shard_numel, dtype=wide, device=partition.device)
    _write_full_values(partition, unit, index, values, default.flatten().to(wide))
    if (fragment := unit.layout.fragment_of(entry, partition.rank)) is not None:
        for _, kept in states.states([entry.name], decoded=True):
            if kind in kept:
                values[fragment.shard_offset : fragment.shard_offset + fragment.length].copy_(kept[kind])
    return _gather_full(partition, unit, index, values)


def _write_to_tier(
    partition: Partition, unit: Unit, states: StateTier, index: int, kind: str, flat: torch.Tensor
) -> None:
    """Write this rank's fragment of ``flat``, the full ``kind`` ("master" or the name of a state) of parameter
    ``index`` as a 1-D tensor, into its tier ``states``; do nothing where this rank has no fragment of the parameter, or
    the tier no such kind."""
    entry = unit.layout.entries[index]
    fragment = unit.layout.fragment_of(entry, partition.rank)
    if fragment is not None and kind in states.kinds(entry.name):
        part = flat[fragment.param_offset : fragment.param_offset + fragment.length]
        states.write({entry.name: {kind: part.cpu()}})


def _check_key(unit: Unit, index: int, key: str, everyones: Sequence[Sequence[str]]) -> None:
    """Raise `PartitionError` if ``key`` is none of the states that the ranks have of parameter ``index``; do nothing if
    no rank has any. ``everyones``: by rank, the names of its states with a value per element."""
    known = sorted({name for names in everyones for name in names})
    if known and key not in known:
        name, have = unit.names[index], ", ".join(known)
        raise PartitionError(f"parameter '{name}' has no optimizer state '{key}' per element; it has {have}")


def _elementwise_state(optimizer: ShardedOptimizer, owned: OwnedFragment, key: str) -> torch.Tensor | None:
    """Return the optimizer's state ``key`` of the fragment ``owned``; None unless there is one with a value per
    element."""
    state = optimizer.state_of(owned).get(key)
    return state if isinstance(state, torch.Tensor) and state.numel() == owned.fragment.length else None


def _broadcast_value(
    partition: Partition, unit: Unit, index: int, what: str, value: torch.Tensor, refusal: str | None = None
) -> torch.Tensor:
    """Return rank 0's ``value`` for parameter ``index`` of ``unit`` on every rank: 1-D, in the parameter's dtype or
    float32 if that is wider. Waits for updates that still run. Collective.

    ``what``: names the value in messages. ``refusal``: why this rank cannot take a value, None if it can. Raises
    `PartitionError` on every rank if one has a refusal, or a value that has not the parameter's shape.
    """
    entry = unit.layout.entries[index]
    if tuple(value.shape) != entry.shape:
        refusal = f"the new {what} of '{entry.name}' has shape {tuple(value.shape)}, expected {entry.shape}"
    for told in partition.runtime.agree(f"set full {what}", entry.name, refusal):
        if told is not None:
            raise PartitionError(told)
    partition.finish_updates()
    wide = torch.promote_types(unit.plan.dtype, torch.float32)
    flat = value.detach().to(partition.device, wide, copy=True).flatten()
    partition.groups.broadcast(flat, 0, Tag("broadcast", entry.name, partition.runtime.step))
    return flat


def _write_full_values(partition: Partition, unit: Unit, index: int, target: torch.Tensor, flat: torch.Tensor) -> None:
    """Write ``flat``, the full values of parameter ``index`` of ``unit`` (1-D), to their place in ``target``: a 1-D
    tensor as large as the unit's flat buffer, or as this rank's shard, which gets only its fragment."""
    entry = unit.layout.entries[index]
    if target.numel() == unit.layout.numel:
        target[entry.offset : entry.end].copy_(flat)
        return
    if (fragment := unit.layout.fragment_of(entry, partition.rank)) is not None:
        part = flat[fragment.param_offset : fragment.param_offset + fragment.length]
        target[fragment.shard_offset : fragment.shard_offset + fragment.length].copy_(part)


def _find_unit(partition: Partition, parameter: nn.Parameter) -> tuple[Unit, int]:
    """Return the unit that holds ``parameter``, and its index there. Raises `PartitionError`, saying why, if no unit
    holds it."""
    found = partition.find(parameter)
    if found is None:
        raise PartitionError(explain_missing(partition, parameter))
    return found


def _gather_full(partition: Partition, unit: Unit, index: int, source: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements of parameter ``index`` of ``unit`` in ``source``, in the parameter's shape.

    ``source``: 1-D, as large as the unit's flat buffer, or this rank's shard. A shard is all-gathered, so the call is
    collective then.
    """
    entry = unit.layout.entries[index]
    full = source
    if source.numel() != unit.layout.numel:
        full = source.new_empty(unit.layout.numel)
        tag = Tag("gather", entry.name, partition.runtime.step)
        partition.groups.gather.all_gather(full, source.contiguous(), tag).wait()
    return full[entry.offset : entry.end].view(entry.shape).clone()
