"""Masters that follow weights which somebody else than the optimizer changed."""

from __future__ import annotations

import torch

from .layout import UnitLayout
from .tier import StateTier

_PIECE = 1 << 15  # elements; torch shares work among threads from more on


def follow(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Take ``weights`` into ``master`` where it does not round to them; elsewhere it knows more digits. Both 1-D.

    On the host in pieces that stay in its caches, of which those that round to their weights are only read.
    """
    on_host = master.device.type == "cpu"
    size = _PIECE if on_host else max(1, master.numel())
    for begin in range(0, master.numel(), size):
        own, given = master[begin : begin + size], weights[begin : begin + size]
        if on_host and torch.equal(own.to(given.dtype), given):
            continue
        changed = own.to(given.dtype) != given
        own.copy_(torch.where(changed, given.to(own.dtype), own))


class TierMasters:
    """The masters of one unit's shard on the tier that keeps and updates them.

    ``rank``: of the shard among those of ``layout``.
    """

    def __init__(self, name: str, layout: UnitLayout, rank: int, states: StateTier) -> None:
        self._name = name
        self._states = states
        self._fragments = list(layout.fragments(rank))
        self._range = layout.shard_range(rank)
        self._stale = False

    def kept(self) -> bool:
        """Return whether the tier has masters that are more than the weights."""
        return any("master" in self._states.kinds(f.entry.name) for f in self._fragments)

    def hand_over(self, source: torch.Tensor, dtype: torch.dtype) -> None:
        """Give the tier the full values ``source`` (1-D) where the weights' ``dtype`` has too few digits for them."""
        start, end = self._range
        own = source[start:end]
        if source.dtype == dtype or bool((own.to(dtype).to(own.dtype) == own).all()):
            return
        masters = {
            f.entry.name: {"master": own[f.shard_offset : f.shard_offset + f.length]}
            for f in self._fragments
            if "master" in self._states.kinds(f.entry.name)
        }
        self._states.write(masters)

    def weights_changed(self) -> None:
        """Have the tier know that weights changed, so that its masters have to follow before they are used."""
        self._states.weights_changed(self._name)
        self._stale = True

    def published(self) -> None:
        """The weights are those that the tier's update made."""
        self._stale = False

    @property
    def stale(self) -> bool:
        """Return whether weights changed since the last update."""
        return self._stale

    def settle(self, shard: torch.Tensor) -> None:
        """Have the masters follow the weights in ``shard`` now, which the next update would do itself."""
        for fragment in self._fragments:
            for name, kept in list(self._states.states([fragment.entry.name], stale_masters=True)):
                if "master" in kept:
                    weights = shard[fragment.shard_offset : fragment.shard_offset + fragment.length]
                    follow(kept["master"], weights.to(kept["master"].device))
                    self._states.write({name: {"master": kept["master"]}})
        self._stale = False
