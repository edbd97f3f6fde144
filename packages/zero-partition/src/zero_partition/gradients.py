"""A unit's gradients: autograd's go into a flat buffer, and a reduce-scatter averages it into the owners' shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from zero_comm import Group, Reduction, Tag, Work

from .checksums import digest_of
from .device_values import squares_on_device
from .errors import EditRefusedError
from .flat_slicer import FlatSlicer
from .leaves import LeafTree
from .needs import AveragingOptimizer
from .norm import norm_squared
from .tier import StateTier
from .unit import Unit

Watch = Callable[[torch.Tensor, Sequence[bool]], None]
"""Called with a flat buffer of gradients and, for each of the unit's parameters, whether it has one there."""


class Unreduced(NamedTuple):
    """Gradients that wait for a reduction: the ``flat`` buffer (None where there is none yet), each parameter's view of
    it, and whether its gradient is there."""

    flat: torch.Tensor | None
    views: list[torch.Tensor]
    present: list[bool]


class UnitGradients:
    """Collects one trainable unit's gradients on this rank, and reduce-scatters them. Parameters are named by their
    index in the unit (``number``, ``numbers``).

    ``reduction``: averages over the ranks. ``accumulate_dtype``: dtype of the averaged gradient, and of the flat buffer
    for autograd's gradients when several backward passes add up in it; else that buffer has the parameters' dtype.
    ``wire_dtype``: dtype that is sent. ``keep_flat``: the flat buffer is kept from step to step (stages 0 and 1)
    instead of until it was reduced. ``full_group``: the group in which every rank gets the full averaged gradient
    (stage 0), else None. ``states``: the tier that keeps the averaged gradient; without it the device does. ``leaves``:
    adds the reductions of a step along a tree (see leaves.py); there is an averaged gradient only after all of them.

    Attributes:
        norm: returns the sum of squares of an averaged shard; used by `square`.
        is_norm_plain: the device may add the squares of a shard on its way to a tier, in place of ``norm``.
        reduced: the averaged gradient, accumulate dtype: this rank's shard, or with ``full_group`` the flat buffer;
            None before the first reduction since `clear`, and always where ``states`` keeps it.
        touched: for each parameter, whether this rank has had a gradient since `clear`.
        watches: called with the flat buffer before each reduction.
    """

    def __init__(
        self,
        unit: Unit,
        reduction: Reduction,
        *,
        accumulate_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        keep_flat: bool,
        full_group: Group | None,
        states: StateTier | None = None,
        leaves: LeafTree | None = None,
    ) -> None:
        self.unit = unit
        self.norm: Callable[[torch.Tensor], Any] = norm_squared
        self.is_norm_plain = False
        self.leaves = leaves
        self.watches: list[Watch] = []
        self._leaf: torch.Tensor | None = None
        self._spare_leaf: torch.Tensor | None = None
        self._states = states
        self._arriving: torch.Tensor | None = None
        self._square: Any = None
        self.reduced: torch.Tensor | None = None
        self.touched = [False] * len(unit.parameters)
        self._averaging: AveragingOptimizer | None = None
        self._reduction = reduction
        self._accumulate_dtype = accumulate_dtype
        self._wire_dtype = wire_dtype
        self._keep_flat = keep_flat
        self._full_group = full_group
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        entries = unit.layout.entries
        places = [(e.offset, e.end) for e in entries]
        self._slicer = FlatSlicer(places, unit.layout.numel, [e.shape for e in entries])
        self._spare_views: list[torch.Tensor] = []
        self._present = [False] * len(unit.parameters)
        self._spare: torch.Tensor | None = None
        self._travels = False

    @property
    def has_unreduced(self) -> bool:
        """Return whether this rank holds gradients of the unit that were not sent into a reduction yet."""
        return any(self._present)

    @property
    def present(self) -> Sequence[bool]:
        """Return for each parameter whether this rank holds a gradient that was not sent into a reduction yet."""
        return tuple(self._present)

    @property
    def has_all(self) -> bool:
        """Return whether `present` is True for every parameter."""
        return all(self._present)

    @property
    def is_shown(self) -> bool:
        """Return whether the user sees the averaged gradient in ``.grad`` (stage 0)."""
        return self._full_group is not None

    @property
    def is_alone(self) -> bool:
        """Return whether the user sees the averaged gradient in ``.grad`` (`is_shown`), and no other rank takes part in
        the average."""
        return self._full_group is not None and self._full_group.world_size == 1

    @property
    def is_reduced(self) -> bool:
        """Return whether a reduction has given an averaged gradient, or is in flight for one, since `clear`; under a
        tree, whether all its reductions have. The same on every rank."""
        return self._states.has_gradient(self.unit.name) if self._states is not None else self.reduced is not None

    @contextmanager
    def averaged(self, *, dirty: bool = False) -> Iterator[torch.Tensor]:
        """Lend the averaged gradient to the block: this rank's shard (1-D), or at stage 0 the flat buffer's elements,
        of which only this rank's shard is averaged before `gather_full`.

        ``dirty``: the block changes it. Only when `is_reduced`, and valid inside the block only.
        """
        if dirty:
            self._square = None
        if self._states is None:
            yield cast(torch.Tensor, self.reduced)
        else:
            with self._states.gradient(self.unit.name, dirty=dirty) as gradient:
                yield gradient

    def square(self) -> Any:
        """Return the sum of squares of this rank's averaged shard: what `norm` returns, or a float that the device has
        added up and that is waited for. Kept until the gradient changes. Only when `is_reduced`, not at stage 0."""
        if self._square is None:
            with self.averaged() as gradient:
                self._square = self.norm(gradient)
        elif isinstance(self._square, torch.Tensor):
            self._square = float(self._square)
        return self._square

    @property
    def square_on_device(self) -> torch.Tensor | None:
        """Return the sum of squares that `square` would wait for, as a 0-D tensor on the device; None if there is none
        to wait for."""
        return self._square if isinstance(self._square, torch.Tensor) else None

    def settle_square(self, square: float) -> None:
        """Set the sum of squares to ``square``, the value of `square_on_device`, so that the method `square` does not
        wait."""
        self._square = square

    def add(self, index: int, gradient: torch.Tensor, *, more_follow: bool) -> None:
        """Add a copy of ``gradient``, of the unit's parameter ``index``, to the gradients that wait for a reduction.

        The parameter counts as touched. ``more_follow``: no reduction follows this backward pass, so a new buffer has
        the accumulate dtype. Raises `EditRefusedError` for a gradient that does not broadcast to the shape that the
        parameter had at initialize.
        """
        if self._flat is None:
            self._allocate(gradient.device, self._accumulate_dtype if more_follow else self.unit.plan.dtype)
        view = self._views[index]
        try:
            if self._present[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        except RuntimeError as failure:
            if gradient.shape == view.shape:
                raise
            raise EditRefusedError(
                f"parameter '{self.unit.names[index]}' got a gradient of shape {tuple(gradient.shape)}, expected "
                f"{tuple(view.shape)}: it was given a tensor of another shape after initialize. Resize parameters "
                "before initialize; the weights that the optimizer has were not changed."
            ) from failure
        self._present[index] = self.touched[index] = True

    def take_unreduced(self) -> Unreduced:
        """Return the gradients that no reduction has taken yet, and hold none any more; `put_unreduced` gives them
        back."""
        taken = Unreduced(self._flat, self._views, self._present)
        self._flat, self._views, self._present = None, [], [False] * len(self._present)
        return taken

    def put_unreduced(self, taken: Unreduced | None) -> None:
        """Hold again the gradients ``taken`` by `take_unreduced`; do nothing for None. Only while no other gradient
        waits for a reduction."""
        if taken is not None:
            self._flat, self._views, self._present = taken

    def show(self, watch: Watch) -> None:
        """Call ``watch`` with the flat buffer of the gradients that no reduction has taken yet; do nothing if there are
        none. The buffer is this object's: ``watch`` copies what it keeps."""
        if self._flat is not None and any(self._present):
            watch(self._flat, tuple(self._present))

    def start_reduce_scatter(self, step: int, device: torch.device) -> Work:
        """Start to average the gradients that have arrived, zeros for the other parameters, into the owners' shards;
        return the work to wait for, after which `finish_reduce_scatter` follows. Collective: every rank calls it at the
        same point of the order of reductions.

        Calls `watches` first. Nothing is sent where an averaging optimizer wants this rank's own gradients. ``step``:
        number for the tag. ``device``: of a buffer of zeros, where no gradient has arrived.
        """
        if self._flat is None:
            self._allocate(device, self.unit.plan.dtype)
        flat = cast(torch.Tensor, self._flat)
        if not all(self._present):
            for view, present in zip(self._views, self._present, strict=True):
                if not present:
                    view.zero_()
        for watch in self.watches:
            watch(flat, tuple(self._present))
        self._present = [False] * len(self._present)
        own, again = self._reduction_target(flat)
        if self._keeps_own():
            return self._adopt_own(flat, again)
        payload = flat if flat.dtype == self._wire_dtype else flat.to(self._wire_dtype)
        self._travels = True
        self._retire_flat(flat, again)
        return self._reduction.reduce_scatter(payload, own, Tag("reduce", self.unit.name, step), accumulate=again)

    def _adopt_own(self, flat: torch.Tensor, again: bool) -> Work:
        """Put this rank's own gradients, the buffer ``flat``, into `reduced` without averaging them; with ``again`` add
        them to what is there. Return a finished work, as nothing is sent."""
        reduced = cast(torch.Tensor, self.reduced)
        if again:
            reduced.add_(flat)
        elif reduced is not flat:
            reduced.copy_(flat)
        self._retire_flat(flat, again)
        return Work(Tag("reduce", self.unit.name))

    def set_averaging_optimizer(self, optimizer: AveragingOptimizer) -> None:
        """Have steps keep this rank's own gradients, not the average, whenever ``optimizer`` wants them; at stage 0
        only."""
        self._averaging = optimizer

    def _keeps_own(self) -> bool:
        """Return whether an averaging optimizer wants this rank's own gradients in this step; the same on every
        rank."""
        return self._averaging is not None and self._averaging.wants_own_gradients

    def _retire_flat(self, flat: torch.Tensor, again: bool) -> None:
        """Give up the buffer ``flat``, whose gradients a reduction has taken; with ``keep_flat`` keep it for the
        gradients of the next step.

        ``again``: the reduction is added to an earlier one of the step, whose buffer is kept already.
        """
        if self._keep_flat and (self.leaves is not None or not again):
            self._spare, self._spare_views = flat, self._views
        self._flat, self._views = None, []

    def finish_reduce_scatter(self) -> None:
        """Take the result of the reduction that `start_reduce_scatter` started and the caller has waited for. Sends
        nothing.

        Under a tree or with a tier the averaged shard is handed to it, and the sum of squares of what goes to a tier is
        found. Otherwise the result is in `reduced` already, and nothing is left to do.
        """
        self._travels = False
        if self.leaves is not None:
            self._add_leaf(self.leaves)
        arriving, self._arriving = self._arriving, None
        if self._states is None or arriving is None:
            return
        if arriving.device.type == "cpu":
            self._square = self.norm(arriving)
            self._states.give_back_gradient(self.unit.name)
        else:
            parts = self._states.add_gradient(self.unit.name, arriving)
            self._square = squares_on_device(parts).sum() if self.is_norm_plain else None

    def _add_leaf(self, leaves: LeafTree) -> None:
        """Add the shard of the reduction that is complete to the step's tree ``leaves``. Once the tree has all, make
        its mean the averaged gradient: in `reduced` (at stage 0 only this rank's shard of it), or on its way to the
        tier."""
        leaf, self._leaf = cast(torch.Tensor, self._leaf), None
        mean = leaves.add(leaf)
        if mean is None:
            return
        if self._states is None:
            if self._full_group is None:
                self.reduced = mean
            else:
                kept = self._spare is not None and self._spare.dtype == self._accumulate_dtype
                self.reduced = self._spare if kept else mean.new_empty(self.unit.layout.numel)
                self._slice(cast(torch.Tensor, self.reduced)).copy_(mean)
                self._spare_leaf = mean
        elif mean.device.type == "cpu":
            self._arriving, _ = self._states.borrow_gradient(self.unit.name)
            self._arriving.copy_(mean)
        else:
            self._arriving = mean

    def reduce_again(self, flat: torch.Tensor, before: torch.Tensor | None, step: int) -> torch.Tensor:
        """Average ``flat``, a copy of a buffer that a watch was called with, once more, wait, and return the result.
        Collective, outside passes.

        The average is added to ``before``, a copy of an earlier `averaged`, which may be overwritten; None: to nothing.
        The result has the form that `averaged` gives: a shard, or at stage 0 the full gradient. ``step``: number for
        the tag.
        """
        numel = self.unit.layout.shard_numel if self._full_group is None else self.unit.layout.numel
        found = flat.new_empty(numel, dtype=self._accumulate_dtype) if before is None else before.to(flat.device)
        own = found if self._full_group is None else self._slice(found)
        tag = Tag("reduce", self.unit.name, step)
        payload = flat if flat.dtype == self._wire_dtype else flat.to(self._wire_dtype)
        self._reduction.reduce_scatter(payload, own, tag, accumulate=before is not None).wait()
        if self._full_group is not None:
            self._full_group.all_gather(found, own, tag).wait()
        return found

    def gather_full(self, step: int) -> Work | None:
        """Start the all-gather that gives every rank the full averaged gradient (stage 0), and return the work to wait
        for.

        Call it once, after the last reduction before the step, on every rank. None if there is nothing to gather: from
        stage 1 on, without a reduction, or where each rank keeps its own gradients. ``step``: number for the tag.
        """
        if self._full_group is None or self.reduced is None or self._keeps_own():
            return None
        return self._full_group.all_gather(self.reduced, self._slice(self.reduced), Tag("reduce", self.unit.name, step))

    def drop_reduction(self) -> None:
        """Drop the reduction in flight, if there is one, which will never complete as the pass has failed; `clear` has
        to follow when all units have dropped theirs."""
        self._travels, self._leaf = False, None
        arriving, self._arriving = self._arriving, None
        if self._states is not None and arriving is not None and arriving.device.type == "cpu":
            self._states.give_back_gradient(self.unit.name)

    def clear(self) -> None:
        """Forget all gradients of the unit, averaged or not, and those of every unit that the tier keeps. Buffers that
        are kept from step to step stay."""
        if self.leaves is not None and self._keep_flat and self._full_group is None and self.reduced is not None:
            self._spare_leaf = self.reduced
        self.reduced = None
        self._square = None
        if self.leaves is not None:
            self.leaves.clear()
        if self._states is not None:
            self._states.clear_gradients()
        self._present = [False] * len(self._present)
        self.touched = [False] * len(self.touched)

    def discard(self, numbers: Collection[int], *, keep_zeros: bool = False) -> None:
        """Make the gradients of the parameters ``numbers`` zeros, averaged or not, and have the parameters count as
        having none; ``keep_zeros``: those that had one still count as having one."""
        for number in numbers:
            if self._present[number]:
                self._views[number].zero_()
            if not keep_zeros:
                self._present[number] = self.touched[number] = False
        if self.is_reduced:
            with self.averaged(dirty=True) as averaged:
                for start, end in self._ranges(numbers, averaged):
                    averaged[start:end].zero_()

    def full_gradient(self, number: int) -> torch.Tensor:
        """Return a copy of the averaged gradient of parameter ``number``, in its shape; only after `gather_full`."""
        entry = self.unit.layout.entries[number]
        return cast(torch.Tensor, self.reduced)[entry.offset : entry.end].view(entry.shape).clone()

    def digest(self) -> int:
        """Return a 64-bit digest of the unit's full averaged gradient, to compare ranks by; only after
        `gather_full`."""
        return digest_of(cast(torch.Tensor, self.reduced))

    def adopt_shown(self) -> None:
        """Copy elements that user code changed in the tensors of `full_gradients` to `reduced`; other elements keep all
        digits of the average.

        Only after `full_gradients`, and before the next; does nothing where these are views of `reduced`.
        """
        reduced = cast(torch.Tensor, self.reduced)
        if reduced.dtype != self.unit.plan.dtype:
            shown = cast(torch.Tensor, self._spare)
            changed = reduced.to(shown.dtype) != shown
            reduced.copy_(torch.where(changed, shown.to(reduced.dtype), reduced))

    def tensors(self) -> list[torch.Tensor]:
        """Return every buffer of gradients that this object holds now."""
        held = [t for t in (self._flat, self._spare, self.reduced, self._spare_leaf) if t is not None]
        return held if self.leaves is None else held + self.leaves.tensors()

    def full_gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, bool]]:
        """Yield, for each parameter, (parameter, its averaged gradient in its shape and the unit's dtype, whether this
        rank touched it).

        Only after `gather_full`; nothing from stage 1 on. The gradients are views of `reduced`, or, where that has
        another dtype, of a cast copy that the next call overwrites.
        """
        if self._full_group is None or self.reduced is None:
            return
        shown = self.reduced if self.reduced.dtype == self.unit.plan.dtype else self._narrowed(self.reduced)
        yield from zip(self.unit.parameters, self._slicer(shown), self.touched, strict=True)

    def _narrowed(self, reduced: torch.Tensor) -> torch.Tensor:
        """Return ``reduced``, the averaged gradient, cast to the parameters' dtype, in a buffer that the next call
        overwrites and the next gradients may use."""
        if self._spare is None or self._spare.dtype != self.unit.plan.dtype:
            self._spare, self._spare_views = torch.empty_like(reduced, dtype=self.unit.plan.dtype), []
        return self._spare.copy_(reduced)

    def _reduction_target(self, flat: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return (the shard that the reduction of ``flat`` is written to, whether it is added to what is there).

        The shard is a node of the tree, memory of (or on its way to) the tier, or a part of `reduced`. The step's first
        reduction makes `reduced`: of ``flat`` itself, which the shard then overlaps, if the flat buffer is kept and has
        the accumulate dtype; else new. `finish_reduce_scatter` or `drop_reduction` has to follow. Forgets the sum of
        squares.
        """
        self._square = None
        if self.leaves is not None:
            neighbour = self.leaves.neighbour()
            self._leaf = self._new_leaf(flat.device) if neighbour is None else neighbour
            return self._leaf, neighbour is not None
        if self._states is not None:
            if flat.device.type == "cpu":
                self._arriving, again = self._states.borrow_gradient(self.unit.name)
                return self._arriving, again
            self._arriving = flat.new_empty(self.unit.layout.shard_numel, dtype=self._accumulate_dtype)
            return self._arriving, False
        if self.reduced is not None:
            return (self._slice(self.reduced) if self._full_group is not None else self.reduced), True
        if self._keep_flat and flat.dtype == self._accumulate_dtype:
            self.reduced = flat if self._full_group is not None else self._slice(flat)
            return self._slice(flat), False
        numel = self.unit.layout.numel if self._full_group is not None else self.unit.layout.shard_numel
        self.reduced = torch.empty(numel, dtype=self._accumulate_dtype, device=flat.device)
        return (self._slice(self.reduced) if self._full_group is not None else self.reduced), False

    def _new_leaf(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialised shard on ``device`` for the reduction of a tree's next leaf: a kept one if there is
        one."""
        leaf, self._spare_leaf = self._spare_leaf, None
        if leaf is None:
            leaf = torch.empty(self.unit.layout.shard_numel, dtype=self._accumulate_dtype, device=device)
        return leaf

    def _ranges(self, numbers: Collection[int], averaged: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yield the range [first element, end) of each of the parameters ``numbers`` in ``averaged``, which is the full
        averaged gradient or this rank's shard; parameters outside the shard have none."""
        layout = self.unit.layout
        if averaged.numel() == layout.numel:
            yield from ((layout.entries[n].offset, layout.entries[n].end) for n in numbers)
            return
        chosen = {id(layout.entries[n]) for n in numbers}
        for fragment in layout.fragments(self._reduction.rank):
            if id(fragment.entry) in chosen:
                yield fragment.shard_offset, fragment.shard_offset + fragment.length

    def _slice(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of ``full``, 1-D and as large as the flat buffer, as a view."""
        start, end = self.unit.layout.shard_range(self._reduction.rank)
        return full[start:end]

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make the flat buffer of ``dtype`` on ``device`` for the next gradients, and its views. Takes the kept buffer
        if that is free and of this dtype.

        Elements of parameters have any value; gaps between them are zeros.
        """
        layout = self.unit.layout
        free = self.reduced is None and not self._travels  # late gradients come while the spare buffer is sent
        if self._spare is not None and free and self._spare.dtype == dtype:
            flat, views = self._spare, self._spare_views
        else:
            flat, views = torch.empty(layout.numel, dtype=dtype, device=device), []
        for start, end in layout.gaps:
            flat[start:end].zero_()
        self._views = views or self._slicer(flat)
        self._flat = flat  # last: an interrupt leaves no buffer without views
