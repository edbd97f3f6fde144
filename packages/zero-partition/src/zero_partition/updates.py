"""Run the optimizer's arithmetic over the parts of parameters that a rank updates.

The optimizer's param groups hold one tensor for each such part. A parameter is touched in a step if any rank had a
gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from zero_comm import Tag

from .flat_slicer import FlatSlicer
from .layout import Fragment, element_positions
from .needs import NormOptimizer, PartialNorms, PositionedOptimizer
from .norm import GRID
from .partition import Partition
from .tier import StateTier
from .unit import Unit

Touched = Mapping[int, Sequence[bool]]
"""By index of a unit, for each of its parameters, whether any rank had a gradient."""
Factor = float | torch.Tensor
"""A factor for gradients; a 0-D tensor on their device where only that knows it."""


@dataclass(frozen=True)
class OwnedFragment:
    """The part of one parameter that this rank updates.

    ``number``: the parameter's index in ``unit``. ``fragment``: its elements. ``tensor``: stands for it in the
    optimizer's param groups.
    """

    unit: Unit
    number: int
    fragment: Fragment
    tensor: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """The true shape of ``tensor``, which shows user code the full parameter's shape instead."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.shape

    @property
    def reduced_start(self) -> int:
        """Offset of the fragment in the unit's master and reduced gradient, in elements."""
        return start_in_reduced(self.unit, self.fragment)


class OptimizerStep(Protocol):
    """Runs the optimizer's `step` with the user's hooks, and a function between these and the arithmetic."""

    def __call__(self, begin: Callable[[], None] | None = None, /) -> None:
        """Run the user's step pre-hooks, ``begin`` (None for nothing), the optimizer's arithmetic, and the user's
        post-hooks."""


class Update(Protocol):
    """A way to run the optimizer: on fragments, on full parameters, or on a tier.

    ``touched`` and ``factor`` of `run`: see `Touched` and `Factor`, the parameters with a gradient on any rank, and a
    factor for the gradients (loss scale and clipping).
    """

    def make_fragment(self, unit: Unit, number: int) -> OwnedFragment | None:
        """Make the fragment that this rank updates of the parameter with index ``number`` in ``unit``; return it, or
        None if this rank updates none.

        Called once for each parameter in the param groups, before the first `run`.
        """

    def run(self, touched: Touched, factor: Factor, step: OptimizerStep) -> None:
        """Update the masters of the units. Collective; called after all ranks have agreed that the step is taken.

        Gives the fragments' tensors their gradients times ``factor`` (no gradient to parameters that no rank
        ``touched``), calls ``step``, and stores the new weights in the masters.
        """


def start_in_reduced(unit: Unit, fragment: Fragment) -> int:
    """Return the offset, in elements, of ``fragment`` in the unit's master and in its reduced gradient; both are full
    at stage 0, else this rank's shard."""
    full = unit.master is not None and unit.master.numel() == unit.layout.numel
    return (fragment.rank * unit.layout.shard_numel if full else 0) + fragment.shard_offset


class FragmentUpdate:
    """The `Update` of fragments in place: the optimizer's tensors are views of the masters, at stage 0 of full
    parameters.

    ``partition``: the sharded model.

    Attributes:
        fragments: those that `make_fragment` has made.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.fragments: list[OwnedFragment] = []
        self._views: list[torch.Tensor] = []
        self._of_unit: dict[int, tuple[list[OwnedFragment], FlatSlicer]] = {}

    def make_fragment(self, unit: Unit, number: int) -> OwnedFragment | None:
        """Return this rank's fragment (at stage 0 the full parameter) of the parameter with index ``number`` in
        ``unit``, with a view of the master as its tensor; None if there is none, and for a frozen unit."""
        entry = unit.layout.entries[number]
        fragment = (
            Fragment(entry, 0, 0, entry.offset, entry.numel)
            if self._partition.options.stage == 0
            else unit.layout.fragment_of(entry, self._partition.rank)
        )
        if unit.master is None or fragment is None:
            return None
        start = start_in_reduced(unit, fragment)
        view = unit.master[start : start + fragment.length]
        view = view.view(entry.shape) if fragment.length == entry.numel else view
        owned = OwnedFragment(unit, number, fragment, nn.Parameter(view))
        self.fragments.append(owned)
        self._views.append(view)
        unit.memory.note_residents([view, owned.tensor])
        return owned

    @torch.no_grad()
    def run(self, touched: Touched, factor: Factor, step: OptimizerStep) -> None:
        """Give the tensors the reduced gradients, scaled by ``factor`` in place (in copies where the dtype differs),
        and call ``step``, which updates the masters in place. Does not communicate."""
        gradients = self._partition.runtime.gradients
        if sum(len(fragments) for fragments, _ in self._of_unit.values()) != len(self.fragments):
            self._of_unit = dict(self._by_unit())
        for index, (fragments, slicer) in self._of_unit.items():
            reduced = gradients[index].reduced
            if reduced is None:
                continue
            present, dtype = touched[index], reduced.dtype
            for owned, gradient in zip(fragments, slicer(reduced), strict=True):
                if present[owned.number]:
                    tensor = owned.tensor
                    tensor.grad = gradient if tensor.dtype is dtype else gradient.to(tensor.dtype)
        scale_and_step(self.fragments, factor, step)
        self._copy_assigned()

    def _copy_assigned(self) -> None:
        """Copy values that user code assigned in the step (``p.data = values``) into the masters, and make the tensors
        views of the masters again."""
        for owned, view in zip(self.fragments, self._views, strict=True):
            if owned.tensor.data_ptr() != view.data_ptr():
                view.copy_(owned.tensor)
                owned.tensor.data = view

    def _by_unit(self) -> Iterator[tuple[int, tuple[list[OwnedFragment], FlatSlicer]]]:
        """Yield (unit index, (the unit's fragments, the `FlatSlicer` that slices its reduced gradient into theirs))."""
        for index in dict.fromkeys(owned.unit.index for owned in self.fragments):
            fragments = [owned for owned in self.fragments if owned.unit.index == index]
            places = [(o.reduced_start, o.reduced_start + o.fragment.length) for o in fragments]
            master = fragments[0].unit.master
            numel = 0 if master is None else master.numel()
            yield index, (fragments, FlatSlicer(places, numel, [o.tensor.shape for o in fragments]))


class ParameterUpdate:
    """The `Update` of full parameters while masters are sharded: each parameter has one rank, its owner, that updates
    it and keeps its state.

    A step gathers a unit's gradients and masters, updates each parameter at its owner, and broadcasts it, which is
    three times the traffic of an all-gather of the unit. Between steps the optimizer's tensors are placeholders.
    ``partition``: the sharded model.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._owner = _balanced_owners(partition)
        self._listed: dict[int, set[int]] = {}
        self.fragments: list[OwnedFragment] = []

    def make_fragment(self, unit: Unit, number: int) -> OwnedFragment | None:
        """Return, on its owner, the full parameter with index ``number`` in ``unit``, with a placeholder as its tensor;
        None on other ranks, and for a frozen unit."""
        if unit.master is None:
            return None
        self._listed.setdefault(unit.index, set()).add(number)
        entry = unit.layout.entries[number]
        if self._owner[entry.name] != self._partition.rank:
            return None
        placeholder = torch.zeros((), dtype=unit.master.dtype, device=unit.master.device).expand(entry.shape)
        fragment = Fragment(entry, self._partition.rank, 0, 0, entry.numel)
        owned = OwnedFragment(unit, number, fragment, nn.Parameter(placeholder))
        self.fragments.append(owned)
        return owned

    @torch.no_grad()
    def run(self, touched: Touched, factor: Factor, step: OptimizerStep) -> None:
        """Gather the masters and gradients of units with ``touched`` parameters, step, and broadcast the new parameters
        into the masters; then, even after an error, make the tensors placeholders again. Collective."""
        units = [self._partition.units[index] for index in sorted(self._listed) if index in touched]
        placeholders = [(owned.tensor, owned.tensor.data) for owned in self.fragments]
        try:
            for unit in units:
                self._gather_owned(unit, touched[unit.index])
            scale_and_step(self.fragments, factor, step)
            for unit in units:
                self._broadcast_updated(unit, touched[unit.index])
        finally:
            for tensor, placeholder in placeholders:
                tensor.data = placeholder

    def _gather_owned(self, unit: Unit, touched: Sequence[bool]) -> None:
        """Gather a unit's masters and gradients, and give the tensors of its ``touched`` parameters that this rank owns
        their values and gradients.

        ``touched``: by the parameter's index in the unit. Collective; does nothing, on any rank, for a unit without
        reduced gradients.
        """
        group, tag = self._partition.groups.gather, Tag("gather", unit.name, self._partition.runtime.step)
        reduced, master = self._partition.runtime.gradients[unit.index].reduced, unit.master
        if reduced is None or master is None:
            return
        gradients, weights = reduced.new_empty(unit.layout.numel), master.new_empty(unit.layout.numel)
        works = [group.all_gather(gradients, reduced, tag), group.all_gather(weights, master, tag)]
        for work in works:
            work.wait()
        for owned in self.fragments:
            if owned.unit is unit and touched[owned.number]:
                entry = owned.fragment.entry
                owned.tensor.data = weights[entry.offset : entry.end].view(entry.shape).clone()
                gradient = gradients[entry.offset : entry.end].view(entry.shape)
                owned.tensor.grad = gradient.to(owned.tensor.dtype, copy=True)

    def _broadcast_updated(self, unit: Unit, touched: Sequence[bool]) -> None:
        """Broadcast each ``touched`` parameter of ``unit`` from its owner, and copy this rank's fragment of it into the
        master. ``touched``: by the parameter's index in the unit. Collective."""
        group, rank = self._partition.groups.gather, self._partition.rank
        mine = {owned.number: owned.tensor.data for owned in self.fragments if owned.unit is unit}
        shard = unit.master
        if shard is None:
            return
        for number in sorted(self._listed[unit.index]):
            if not touched[number]:
                continue
            entry = unit.layout.entries[number]
            full = mine[number].flatten() if number in mine else shard.new_empty(entry.numel)
            tag = Tag("broadcast", entry.name, self._partition.runtime.step)
            group.broadcast(full, self._owner[entry.name], tag).wait()
            if (fragment := unit.layout.fragment_of(entry, rank)) is not None:
                part = full[fragment.param_offset : fragment.param_offset + fragment.length]
                shard[fragment.shard_offset : fragment.shard_offset + fragment.length].copy_(part)


class TierUpdate:
    """The `Update` that has a tier do the arithmetic, with the hyperparameters of the optimizer's param groups.

    The optimizer's tensors are placeholders. Its `step` runs without gradients, only for its hooks. ``states``: the
    tier. ``partition``: the sharded model.
    """

    def __init__(self, partition: Partition, states: StateTier) -> None:
        self._partition = partition
        self._states = states
        self.fragments: list[OwnedFragment] = []

    def make_fragment(self, unit: Unit, number: int) -> OwnedFragment | None:
        """Return this rank's fragment of the parameter with index ``number`` in ``unit``, with a placeholder as its
        tensor; None if there is none, and for a frozen unit."""
        fragment = unit.layout.fragment_of(unit.layout.entries[number], self._partition.rank)
        if unit.states is None or fragment is None:
            return None
        wide = torch.promote_types(unit.plan.dtype, torch.float32)
        shape = fragment.entry.shape if fragment.length == fragment.entry.numel else (fragment.length,)
        placeholder = torch.zeros((), dtype=wide, device=self._partition.device).expand(shape)
        owned = OwnedFragment(unit, number, fragment, nn.Parameter(placeholder))
        self.fragments.append(owned)
        return owned

    def run(self, touched: Touched, factor: Factor, step: OptimizerStep) -> None:
        """Start a step of the tier, which writes the new weights into the shards and leaves out parameters that no rank
        ``touched``; it may still run on return. The optimizer's hooks run around it, without gradients."""
        absent = {
            owned.fragment.entry.name
            for owned in self.fragments
            if owned.unit.index in touched and not touched[owned.unit.index][owned.number]
        }
        step(lambda: self._states.step(grad_scale=float(factor), absent=absent))


class NormReduction:
    """Adds up an optimizer's partial norms over the ranks, in rank order; at stage 0 they are complete already. A
    `ReduceNorms`.

    A partial norm is the sum of squares of a fragment. ``partition``: the sharded model. ``fragments``: all whose
    tensors the optimizer steps.
    """

    def __init__(self, partition: Partition, fragments: Sequence[OwnedFragment]) -> None:
        self._partition = partition
        self._key = {id(o.tensor): f"{o.unit.index}.{o.number}" for o in fragments}

    def __call__(self, partial: PartialNorms) -> list[tuple[float, ...]]:
        """Return the squared norms of the full parameters, a tuple for each item of ``partial``, in its order.
        Collective.

        ``partial``: (tensor of the param groups, sums of squares over this rank's fragment), such as of weight and
        update.
        """
        if self._partition.options.stage == 0:
            return [tuple(norms) for _, norms in partial]
        mine = {self._key[id(tensor)]: list(norms) for tensor, norms in partial}
        totals: dict[str, tuple[float, ...]] = {}
        for answer in self._partition.runtime.agree("norms", "", mine)[: self._partition.world_size]:
            for key, part in answer.items():
                before = totals.get(key, (0.0,) * len(part))
                totals[key] = tuple(a + b for a, b in zip(before, part, strict=True))
        return [totals[self._key[id(tensor)]] for tensor, _ in partial]


def scale_and_step(fragments: Sequence[OwnedFragment], factor: Factor, step: OptimizerStep) -> None:
    """Multiply the gradients of the fragments' tensors by ``factor`` in place and call ``step``; then, even after an
    error, set the gradients to None."""
    gradients = [owned.tensor.grad for owned in fragments if owned.tensor.grad is not None]
    if isinstance(factor, torch.Tensor):
        for dtype in {gradient.dtype for gradient in gradients}:
            alike = [gradient for gradient in gradients if gradient.dtype is dtype]
            torch._foreach_mul_(alike, factor.to(dtype))
    elif factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
    try:
        step()
    finally:
        for owned in fragments:
            owned.tensor.grad = None


def update_for(optimizer: Optimizer, partition: Partition, *, full: bool) -> Update:
    """Return the `Update` that runs ``optimizer``: on the tier if there is one, else on full parameters or fragments.

    ``full``: it needs full parameters; at stage 0, where each fragment is one, that changes nothing.
    """
    if partition.states is not None:
        return TierUpdate(partition, partition.states)
    if full and partition.options.stage >= 1:
        return ParameterUpdate(partition)
    return FragmentUpdate(partition)


def connect_positions(optimizer: Optimizer, partition: Partition, fragments: Sequence[OwnedFragment]) -> None:
    """Under virtual ranks, give a `PositionedOptimizer`, for good, the position of each tensor's first element among
    the elements of all parameters, which is the same at any world size. Do nothing for another optimizer."""
    if partition.options.virtual_ranks and isinstance(optimizer, PositionedOptimizer):
        positions = element_positions((unit.layout for unit in partition.units if unit.plan.trainable), GRID)
        optimizer.positions = {o.tensor: positions[o.fragment.entry.name] + o.fragment.param_offset for o in fragments}


def connect_norms(optimizer: Optimizer, partition: Partition, fragments: Sequence[OwnedFragment]) -> None:
    """Give a `NormOptimizer` the function that adds up its partial norms over all ranks, for good; the function keeps
    ``partition`` alive. Do nothing for another optimizer."""
    if isinstance(optimizer, NormOptimizer):
        optimizer.reduce_norms = NormReduction(partition, fragments)


def _balanced_owners(partition: Partition) -> dict[str, int]:
    """Return, by name of a trained parameter, the rank that updates it; the same on every rank.

    Parameters are assigned largest first, each to the rank with the fewest elements so far.
    """
    load = [0] * partition.world_size
    owners = {}
    trained = [entry for unit in partition.units if unit.plan.trainable for entry in unit.layout.entries]
    for entry in sorted(trained, key=lambda entry: (-entry.numel, entry.name)):
        rank = load.index(min(load))
        owners[entry.name] = rank
        load[rank] += entry.numel
    return owners
