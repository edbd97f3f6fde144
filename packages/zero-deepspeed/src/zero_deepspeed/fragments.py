"""Full values and fragments of sharded parameters, their gradients and states, by DeepSpeed's names. A fragment is the
part of one parameter that is in a rank's shard. A partition is what an engine holds of its model: the sharded units,
and the replicated parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from zero_core.errors import UsageError
from zero_partition import (
    Fragment,
    Partition,
    ShardedOptimizer,
    Unit,
    full_gradient,
    full_parameter,
    full_state,
    owner_of,
    set_full_gradient,
    set_full_parameter,
    set_full_state,
)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a full copy of the parameter in the optimizer's precision; None when no engine shards it. Collective."""
    owner = owner_of(param)
    return None if owner is None or owner.find(param) is None else full_parameter(owner, param)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a full copy of the averaged gradient, or ``param.grad`` itself where that is set. Collective.

    None before a backward pass and after the step, and when no engine shards the parameter.
    """
    owner = owner_of(param)
    if param.grad is not None or owner is None or owner.find(param) is None:
        return param.grad
    return full_gradient(owner, param)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a full copy of the optimizer state of that name, such as `exp_avg`; None when no engine has the parameter,
    and for one that is not trained. Collective.

    Zeros before the first step. Raises `UsageError` without an optimizer, and `PartitionError` for another name.
    """
    owner = owner_of(param)
    if owner is None or not _is_trained(owner, param):
        return None
    return full_state(owner, _optimizer(owner), param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the parameter, its master included, by rank 0's ``value``, a tensor of its shape. Collective.

    Raises `UsageError` when no engine has the parameter, and `PartitionError` for another shape.
    """
    set_full_parameter(_owner(param), param, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the averaged gradient by rank 0's ``value``, a tensor of the parameter's shape, until the next step.
    Collective.

    Raises `UsageError` when no engine has the parameter, and `PartitionError` for another shape or before there is a
    gradient.
    """
    set_full_gradient(_owner(param), param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace the optimizer state of that name by rank 0's ``value``, a tensor of the parameter's shape; do nothing for
    a parameter that is not trained. Collective.

    Raises `UsageError` when no engine, or one without an optimizer, has the parameter, and `PartitionError` for another
    shape or before there is such a state.
    """
    owner = _owner(param)
    if not _is_trained(owner, param):
        return
    set_full_state(owner, _optimizer(owner), param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: list[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by ``update_func(gradient, parameter)``; rank 0's result
    counts. Collective.

    ``param_list``: the same parameters, in the same order, on every rank.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's fragment in the optimizer's precision, 1-D; empty if this rank has none. Like all
    `safe_*_local_*` functions it does not communicate.

    Raises `UsageError` below stage 3, and for a parameter that no engine shards, as all `safe_*_local_*` functions do.
    """
    return _read_fragment(param, lambda fragment: fragment.master())


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's fragment of the averaged gradient, 1-D; None before there is a gradient, empty if
    this rank has no fragment. Raises `UsageError` below stage 3, and for a parameter that no engine shards."""
    return _read_fragment(param, lambda fragment: fragment.gradient())


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's fragment of an optimizer state such as `exp_avg`, 1-D; None if there is none (yet),
    empty if this rank has no fragment. Raises `UsageError` below stage 3, and for a parameter that no engine shards."""
    return _read_fragment(param, lambda fragment: fragment.state(optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's fragment of the parameter, its master included; do nothing if this rank has none.

    ``value``: of the fragment's number of elements, in any shape. Raises `UsageError` for another number, below stage
    3, and for a parameter that no engine shards.
    """
    for fragment in _local_fragments(param):
        fragment.set_master(value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's fragment of the averaged gradient until the next step; do nothing if this rank has none.

    ``value``: of the fragment's number of elements, in any shape. Raises `UsageError` for another number, below stage
    3, for a parameter that no engine shards, and before there is a gradient.
    """
    for fragment in _local_fragments(param):
        fragment.set_gradient(value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's fragment of an optimizer state; do nothing if this rank has none.

    ``value``: of the fragment's number of elements, in any shape. Raises `UsageError` for another number, below stage
    3, for a parameter that no engine shards, and before there is a state of that name.
    """
    for fragment in _local_fragments(param):
        fragment.set_state(optim_state_key, value)


class _LocalFragment:
    """Reads and writes this rank's ``fragment`` of one parameter in ``unit``, of its gradient and of its optimizer
    states. ``partition``: of the engine. Values that it returns are 1-D. No method communicates.
    """

    def __init__(self, partition: Partition, unit: Unit, fragment: Fragment) -> None:
        self._partition, self._unit, self._fragment = partition, unit, fragment

    def master(self) -> torch.Tensor:
        """Return a copy of the fragment's master, from the device or the tier that holds it; where there is no master,
        a copy of the fragment of the parameter."""
        kept = self._stored_state("master")
        if kept is not None:
            return kept
        if self._unit.master is not None and self._unit.master.numel() == self._unit.layout.shard_numel:
            return self._slice_of(self._unit.master).clone()
        shard = self._unit.acquire_shard()
        copied = self._slice_of(shard).clone()
        self._partition.residency.release(self._unit.name, dirty=False)
        return copied

    def set_master(self, value: torch.Tensor) -> None:
        """Replace the fragment of the parameter and of its master by ``value``, on every tier, once running saves have
        copied the old values. The other ranks learn of the change with the engine's next collective. Raises
        `UsageError` for another number of elements."""
        flat = self._checked_flat(value)
        self._partition.readers.wait()
        if self._unit.states is not None and "master" in self._unit.states.kinds(self._name):
            self._unit.states.write({self._name: {"master": flat.cpu()}})
        elif self._unit.states is not None:
            self._unit.states.weights_changed(self._unit.name)
        if self._unit.master is not None:
            self._slice_of(self._unit.master).copy_(flat)
        shard = self._unit.acquire_shard()
        self._slice_of(shard).copy_(flat)
        self._partition.residency.release(self._unit.name, dirty=True)
        self._partition.runtime.shard_changed(self._unit)

    def gradient(self) -> torch.Tensor | None:
        """Return a copy of the fragment's averaged gradient; None if the unit has none that is reduced."""
        gradients = self._partition.runtime.gradients.get(self._unit.index)
        if gradients is None or not gradients.is_reduced:
            return None
        with gradients.averaged() as averaged:
            return self._slice_of(averaged).clone()

    def set_gradient(self, value: torch.Tensor) -> None:
        """Replace the fragment's averaged gradient by ``value``; `UsageError` if the unit has no reduced gradient, or
        for another number of elements."""
        gradients = self._partition.runtime.gradients.get(self._unit.index)
        if gradients is None or not gradients.is_reduced:
            raise UsageError(f"parameter '{self._name}' has no gradient to replace; run backward first")
        with gradients.averaged(dirty=True) as averaged:
            self._slice_of(averaged).copy_(self._checked_flat(value))

    def state(self, key: str) -> torch.Tensor | None:
        """Return a copy of the fragment's optimizer state ``key``, such as `exp_avg`; None if there is none."""
        kept = self._stored_state(key)
        return kept if kept is not None else self._optimizer_state(key)

    def set_state(self, key: str, value: torch.Tensor) -> None:
        """Replace the fragment's optimizer state ``key`` by ``value``, on the tier that holds the states, once running
        saves have copied the old one. Raises `UsageError` for another number of elements, and if the torch optimizer
        has no such state."""
        self._partition.readers.wait()
        if self._unit.states is not None:
            self._unit.states.write({self._name: {key: self._checked_flat(value).cpu()}})
            return
        state = self._optimizer_state(key, copied=False)
        if state is None:
            raise UsageError(f"parameter '{self._name}' has no optimizer state '{key}' yet; take a step first")
        state.view(-1).copy_(self._checked_flat(value))

    @property
    def _name(self) -> str:
        """Return the parameter's name."""
        return self._fragment.entry.name

    def _optimizer_state(self, key: str, copied: bool = True) -> torch.Tensor | None:
        """Return a state of the torch optimizer, as a 1-D copy or (``copied`` false) the tensor itself; None if there
        is none, or if it is a single number such as `step`."""
        optimizer = _optimizer(self._partition)
        for owned in optimizer.fragments:
            if owned.fragment is self._fragment or owned.fragment == self._fragment:
                state = optimizer.state_of(owned).get(key)
                if isinstance(state, torch.Tensor) and state.dim():
                    return state.flatten().clone() if copied else state
        return None

    def _stored_state(self, kind: str) -> torch.Tensor | None:
        """Return a 1-D copy of the fragment's state ``kind``, such as "exp_avg" or "master", from the store of the
        unit's tier; None if the store does not hold it."""
        if self._unit.states is not None:
            for _, kept in self._unit.states.states([self._name]):
                if kind in kept:
                    return kept[kind].flatten().clone()
        return None

    def _slice_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the fragment's elements of ``shard`` as a view. ``shard``: this rank's shard, 1-D, of the unit's
        weights, masters or gradients."""
        start = self._fragment.shard_offset
        return shard[start : start + self._fragment.length]

    def _checked_flat(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` as 1-D; `UsageError` if it has another number of elements than the fragment."""
        if value.numel() != self._fragment.length:
            raise UsageError(
                f"this rank's fragment of '{self._name}' has {self._fragment.length} elements, got {value.numel()}"
            )
        return value.detach().flatten()


def _local_fragments(param: nn.Parameter) -> Iterator[_LocalFragment]:
    """Yield this rank's fragment of a parameter, or nothing if this rank has none.

    Raises `UsageError` below stage 3, for a parameter that no engine has, and for a replicated one.
    """
    owner = _owner(param)
    if owner.options.stage < 3:
        raise UsageError("the safe_*_local_* functions are for parameters that stage 3 has partitioned")
    found = owner.find(param)
    if found is None:
        raise UsageError("the parameter is replicated on every rank and has no part of its own")
    unit, index = found
    entry = unit.layout.entries[index]
    for fragment in unit.layout.fragments(owner.rank):
        if fragment.entry is entry:
            yield _LocalFragment(owner, unit, fragment)


def _read_fragment(param: nn.Parameter, read: Callable[[_LocalFragment], torch.Tensor | None]) -> torch.Tensor | None:
    """Return the result of ``read`` for this rank's fragment, None included; an empty tensor of the parameter's dtype
    if this rank has none. Not collective. Raises `UsageError` below stage 3, for a parameter that no engine has, and
    for a replicated one."""
    for fragment in _local_fragments(param):
        return read(fragment)
    return param.new_empty(0)


def _owner(param: nn.Parameter) -> Partition:
    """Return the partition of the engine whose model has the parameter; `UsageError` if there is none."""
    owner = owner_of(param)
    if owner is None:
        raise UsageError(f"a parameter of shape {tuple(param.shape)} does not belong to a model given to initialize")
    return owner


def _is_trained(owner: Partition, param: nn.Parameter) -> bool:
    """Return whether the optimizer updates ``param``: a parameter in a unit if the unit is trained, a replicated one if
    it requires a gradient. ``owner``: the partition that has it.
    """
    found = owner.find(param)
    return param.requires_grad if found is None else found[0].plan.trainable


def _optimizer(owner: Partition) -> ShardedOptimizer:
    """Return the sharded optimizer of the engine that has the partition ``owner``; `UsageError` for an engine without
    one."""
    optimizer = owner.optimizer
    if not isinstance(optimizer, ShardedOptimizer):
        raise UsageError("the engine of this parameter has no optimizer, hence no optimizer state")
    return optimizer
