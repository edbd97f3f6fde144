"""Update masters after something other than the optimizer has changed their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .layout import Fragment, UnitLayout
from .tier import StateTier

_CHUNK = 1 << 15  # elements; torch shares the work on larger tensors among threads


def follow_weights(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Copy ``weights`` into the elements of ``master`` that do not round to them; the others keep their extra digits.

    Both are 1-D and of the same length; ``master`` has the higher precision. On the host they are compared in chunks
    that fit into its caches, and chunks without a difference are not written.
    """
    on_host = master.device.type == "cpu"
    size = _CHUNK if on_host else max(1, master.numel())
    for begin in range(0, master.numel(), size):
        own, given = master[begin : begin + size], weights[begin : begin + size]
        if on_host and torch.equal(own.to(given.dtype), given):
            continue
        changed = own.to(given.dtype) != given
        own.copy_(torch.where(changed, given.to(own.dtype), own))


def copy_fragments(
    fragments: Iterable[Fragment],
    names: Sequence[str],
    values: Mapping[int, torch.Tensor],
    shard: torch.Tensor,
    master: torch.Tensor | None,
) -> None:
    """Copy a rank's ``fragments`` of full ``values`` into its ``shard``, and into ``master`` as `follow_weights` does.

    ``names``: the unit's parameters in order. ``values``: full tensors by the parameter's index in ``names``; fragments
    of others are left alone. ``master``: of the shard's length; the shard itself, or None, if there is no separate one.
    """
    for fragment in fragments:
        number = names.index(fragment.entry.name)
        if number in values:
            end = fragment.param_offset + fragment.length
            new = values[number].flatten()[fragment.param_offset : end]
            place = slice(fragment.shard_offset, fragment.shard_offset + fragment.length)
            apart = master is not None and not master.is_set_to(shard)
            shard[place].copy_(new)
            if master is not None and apart:
                follow_weights(master[place], shard[place])


class TierMasters:
    """The masters of one unit's shard on the tier that keeps and updates them; the weights themselves are elsewhere.

    ``name``: the unit's. ``rank``: number of the shard in ``layout``. ``states``: the tier.
    """

    def __init__(self, name: str, layout: UnitLayout, rank: int, states: StateTier) -> None:
        self._name = name
        self._states = states
        self._fragments = list(layout.fragments(rank))
        self._range = layout.shard_range(rank)
        self._stale = False

    def has_masters(self) -> bool:
        """Return whether the tier keeps masters of a fragment of this shard apart from the weights, in a higher
        precision."""
        return any("master" in self._states.kinds(f.entry.name) for f in self._fragments)

    def store_masters(self, full: torch.Tensor, dtype: torch.dtype) -> None:
        """Write this rank's slice of ``full``, the unit's values (1-D, ``layout.numel`` elements), as masters of those
        fragments of which the tier keeps some.

        Nothing is written if ``dtype``, the weights' own, represents the slice exactly.
        """
        start, end = self._range
        own = full[start:end]
        if full.dtype == dtype or bool((own.to(dtype).to(own.dtype) == own).all()):
            return
        masters = {
            f.entry.name: {"master": own[f.shard_offset : f.shard_offset + f.length]}
            for f in self._fragments
            if "master" in self._states.kinds(f.entry.name)
        }
        self._states.write(masters)

    def note_weights_changed(self) -> None:
        """Tell the tier that the weights were changed, so that its next step updates masters from them before it uses
        the masters; until then, or `follow_now`, the masters are `stale`."""
        self._states.weights_changed(self._name)
        self._stale = True

    @property
    def stale(self) -> bool:
        """True if the weights were changed (`note_weights_changed`) since the last `follow_now`. Masters may be out of
        date then: a step of the tier updates only those of fragments that have a gradient."""
        return self._stale

    def follow_now(self, shard: torch.Tensor) -> None:
        """Update the masters that are out of date from the weights in ``shard`` (1-D, this rank's), as a step of the
        tier would do; masters that a step has updated since are left alone. Then `stale` is False."""
        for fragment in self._fragments:
            if "master" in self._states.held(fragment.entry.name)[1]:
                continue  # a step has done it
            for name, kept in list(self._states.states([fragment.entry.name], stale_masters=True)):
                if "master" in kept:
                    weights = shard[fragment.shard_offset : fragment.shard_offset + fragment.length]
                    follow_weights(kept["master"], weights.to(kept["master"].device))
                    self._states.write({name: {"master": kept["master"]}})
        self._stale = False
