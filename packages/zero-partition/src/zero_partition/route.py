"""Gather a unit's weights: from the shards of all ranks, or from the secondary shards inside the node."""

from __future__ import annotations

import torch

from zero_comm import Codec, Group, QuantizedGather, Tag, Work

from .layout import UnitLayout


class Secondary:
    """This rank's secondary shard of one unit: its slice of a further replica of the weights, sharded over the ranks of
    ``group``, those of a node (hpZ, ZeRO++, arXiv 2306.10209, section 3.2).

    A gather over all ranks fills it; later gathers stay inside ``group`` until the weights change.

    Attributes:
        part: the secondary shard, 1-D, ``layout.numel`` / ranks of ``group`` elements; None before the first gather.
        fresh: it holds the present weights; the same on every rank.
    """

    def __init__(self, group: Group, layout: UnitLayout) -> None:
        self._group = group
        self._numel = layout.numel // group.world_size
        self.part: torch.Tensor | None = None
        self.fresh = False

    @property
    def start(self) -> int:
        """Offset of this rank's secondary shard in the unit's flat buffer, in elements."""
        return self._group.rank * self._numel

    def keep(self, flat: torch.Tensor) -> None:
        """Copy this rank's slice of ``flat``, the gathered flat buffer, into `part`, which is `fresh` then."""
        own = self._own_slice(flat)
        if self.part is None:
            self.part = torch.empty_like(own)
        self.part.copy_(own)
        self.fresh = True

    def all_gather(self, flat: torch.Tensor, tag: Tag) -> Work:
        """Start filling the unit's flat buffer ``flat`` from the secondary shards of the group; return the work to wait
        for.

        Only while `fresh`. Collective in the group. ``tag``: of the collective.
        """
        own = self._own_slice(flat)
        if self.part is not None:
            own.copy_(self.part)
        return self._group.all_gather(flat, own, tag)

    def _own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the unit's flat buffer ``flat``, as a view."""
        return flat[self.start : self.start + self._numel]


class Route:
    """Chooses how one unit's weights are gathered, alike on every rank: exactly, quantized, or inside the node.

    ``group``: the ranks that own a shard each. ``codec``: quantizes the gathers of passes; gathers for the user are
    always exact. ``secondary``: this rank's secondary shard, None if the unit has none. Call order: `all_gather` or
    `all_gather_secondary`, wait for the returned work, `arrived`.
    """

    def __init__(self, group: Group, *, codec: Codec | None = None, secondary: Secondary | None = None) -> None:
        self._group = group
        self._quantized = None if codec is None else QuantizedGather(group, codec)
        self.secondary = secondary
        self._fills_secondary = False

    @property
    def rank(self) -> int:
        """Index of this rank's shard in the unit."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that own a shard each."""
        return self._group.world_size

    @property
    def rounds(self) -> bool:
        """True if passes compute with weights that a codec has rounded; gathers for the user are exact even then."""
        return self._quantized is not None

    @property
    def secondary_shard(self) -> torch.Tensor | None:
        """This rank's secondary shard (1-D); None if the unit has none, or before the first gather."""
        return None if self.secondary is None else self.secondary.part

    def can_use_secondary(self, *, exact: bool) -> bool:
        """Return whether the next gather can be served from the secondary shards: they hold the present weights and, if
        ``exact``, were not rounded by a codec."""
        return self.secondary is not None and self.secondary.fresh and not (exact and self._quantized is not None)

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, tag: Tag, *, exact: bool) -> Work:
        """Start filling the flat buffer ``flat`` from all shards; return the work to wait for, after which `arrived` is
        called.

        ``shard``: this rank's slice of ``flat``, which holds its shard. ``tag``: of the collective. ``exact``: without
        the codec. Collective.
        """
        if self._quantized is None or exact:
            self._fills_secondary = self._quantized is None
            return self._group.all_gather(flat, shard, tag)
        self._fills_secondary = True
        return self._quantized.all_gather(flat, shard, tag)

    def all_gather_secondary(self, flat: torch.Tensor, tag: Tag) -> Work:
        """Start filling the flat buffer ``flat`` from the secondary shards; return the work to wait for, after which
        `arrived` is called.

        Only if `can_use_secondary`. ``tag``: of the collective. Collective in the node. Raises RuntimeError if there
        are no secondary shards.
        """
        if self.secondary is None:
            raise RuntimeError(f"{tag}: there is no secondary copy")
        self._fills_secondary = False
        return self.secondary.all_gather(flat, tag)

    def arrived(self, flat: torch.Tensor) -> None:
        """Keep this rank's secondary shard of ``flat``, which a gather has filled.

        Do nothing without secondary shards, after a gather from them, and after an exact gather if passes use a codec,
        as the secondary shards hold rounded weights then.
        """
        if self.secondary is not None and self._fills_secondary:
            self.secondary.keep(flat)

    def weights_changed(self) -> None:
        """Mark the secondary shard, if there is one, as out of date, as the weights have changed; every rank calls it
        at the same point."""
        if self.secondary is not None:
            self.secondary.fresh = False
