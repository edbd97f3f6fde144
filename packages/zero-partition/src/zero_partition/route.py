"""The way on which a unit's weights come together: all the ranks' shards, or a copy of them inside the node."""

from __future__ import annotations

import torch

from zero_comm import Codec, Group, QuantizedGather, Tag, Work

from .layout import UnitLayout


class Secondary:
    """This rank's part of a copy of one unit's weights that the ranks of ``group`` have between them (hpZ, ZeRO++,
    arXiv 2306.10209, section 3.2).

    A gather over all ranks leaves the copy, and the gathers that follow it until the weights change stay in ``group``.

    Attributes:
        part: this rank's part, 1-D, ``layout.numel`` / ranks of ``group`` elements; None before the first gather.
        fresh: it holds the present weights; the same on every rank.
    """

    def __init__(self, group: Group, layout: UnitLayout) -> None:
        self._group = group
        self._numel = layout.numel // group.world_size
        self.part: torch.Tensor | None = None
        self.fresh = False

    @property
    def start(self) -> int:
        """Where ``part`` begins in the unit's flat buffer."""
        return self._group.rank * self._numel

    def keep(self, flat: torch.Tensor) -> None:
        """Copy this rank's part of the gathered ``flat``."""
        own = self._own(flat)
        if self.part is None:
            self.part = torch.empty_like(own)
        self.part.copy_(own)
        self.fresh = True

    def all_gather(self, flat: torch.Tensor, tag: Tag) -> Work:
        """Fill ``flat`` from the parts of the group; only when `fresh`."""
        own = self._own(flat)
        if self.part is not None:
            own.copy_(self.part)
        return self._group.all_gather(flat, own, tag)

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self._numel]


class Route:
    """How one unit's weights come together, for every rank the same.

    ``group``: the ranks that have a shard each. ``codec``: gathers of passes travel through it; gathers for the user
    are exact always. ``secondary``: where passes find a copy nearer by.
    """

    def __init__(self, group: Group, *, codec: Codec | None = None, secondary: Secondary | None = None) -> None:
        self._group = group
        self._quantized = None if codec is None else QuantizedGather(group, codec)
        self.secondary = secondary
        self._leaves_copy = False

    @property
    def rank(self) -> int:
        """The number of the shard that is this rank's."""
        return self._group.rank

    @property
    def rounds(self) -> bool:
        """Return whether passes compute with what a codec leaves of the weights."""
        return self._quantized is not None

    @property
    def copy_inside_node(self) -> torch.Tensor | None:
        """This rank's part of the copy inside the node, None where there is none."""
        return None if self.secondary is None else self.secondary.part

    def is_near(self, *, exact: bool) -> bool:
        """Return whether the next gather is served by the secondary parts, without any shard."""
        return self.secondary is not None and self.secondary.fresh and not (exact and self._quantized is not None)

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, tag: Tag, *, exact: bool) -> Work:
        """Fill ``flat`` from all shards; ``shard`` is this rank's slice of ``flat``. Call `arrived` after the wait."""
        if self._quantized is None or exact:
            self._leaves_copy = self._quantized is None
            return self._group.all_gather(flat, shard, tag)
        self._leaves_copy = True
        return self._quantized.all_gather(flat, shard, tag)

    def all_gather_near(self, flat: torch.Tensor, tag: Tag) -> Work:
        """Fill ``flat`` from the secondary parts; only when `is_near`."""
        if self.secondary is None:
            raise RuntimeError(f"{tag}: there is no secondary copy")
        self._leaves_copy = False
        return self.secondary.all_gather(flat, tag)

    def arrived(self, flat: torch.Tensor) -> None:
        """The gather has filled ``flat``: keep what the next one needs."""
        if self.secondary is not None and self._leaves_copy:
            self.secondary.keep(flat)

    def weights_changed(self) -> None:
        """The shards hold other weights than before; every rank calls it at the same point."""
        if self.secondary is not None:
            self.secondary.fresh = False
