"""A run's setup: stage, ranks, dtypes and tiers. The argument of every formula for states and traffic. A unit is the
parameters that are gathered and reduced together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import PlanError, at_least_one, one_of

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
STAGES = (0, 1, 2, 3)
ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes per element of each dtype."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter element of each kind of model state.

    ``moments``: of all moments together. ``master``: 0 if there are no masters apart from the parameters. The default
    is Adam in mixed precision: 16 bytes per parameter (Rajbhandari et al. 2020, arXiv 1910.02054v3, section 3.1).
    Raises `PlanError` for negative bytes, and for 0 bytes of parameters or gradients.
    """

    parameter: int = 2
    gradient: int = 2
    master: int = 4
    moments: int = 8

    def __post_init__(self) -> None:
        at_least_one(parameter=self.parameter, gradient=self.gradient)
        if min(self.master, self.moments) < 0:
            raise PlanError(f"expected bytes >= 0, got master={self.master}, moments={self.moments}")

    @classmethod
    def of(cls, dtype: str, *, gradient: str | None = None, master: str = "fp32", moments: int = 2) -> StateBytes:
        """Return the bytes for parameters of ``dtype`` and ``moments`` moments in the master's dtype.

        ``gradient``: dtype of the gradients; default: that of the parameters. There are masters only if their dtype
        differs from the parameters'. Raises `PlanError` for an unknown dtype.
        """
        for name, value in (("dtype", dtype), ("gradient", gradient or dtype), ("master", master)):
            one_of(name, value, ITEMSIZE)
        kept = 0 if dtype == master else ITEMSIZE[master]
        return cls(ITEMSIZE[dtype], ITEMSIZE[gradient or dtype], kept, moments * ITEMSIZE[master])

    @property
    def optimizer(self) -> int:
        """Bytes of the master and the moments per parameter element: K of the ZeRO paper."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """Bytes of all model state per parameter element."""
        return self.parameter + self.gradient + self.optimizer


@dataclass(frozen=True)
class Setup:
    """The setup of a run: stage, ranks, bytes per element, tiers and ZeRO++.

    ``stage``: 0 to 3. ``ranks_per_node``: default all ranks on one node. ``accumulation``: micro-batches per step.
    ``offload_optimizer``, ``offload_parameters``: the tier that keeps the shards of these states. ``hpz``: a secondary
    shard of the parameters per node, which the backward gather reads. ``qwz``: gathers carry 8 bits per element.
    ``qgz``: reductions carry 4 bits per element, first inside the node, then between nodes. ``codec_block``: elements
    per float32 scale of ``qwz`` and ``qgz``. ``alignment``: the length of a shard is a multiple of this many elements.
    ``averaged_bytes``: bytes per element of the averaged gradients that stage 0 gathers, default those of gradients.
    Raises `PlanError` for a combination that is not possible.
    """

    stage: int = 0
    world_size: int = 1
    ranks_per_node: int | None = None
    accumulation: int = 1
    bytes: StateBytes = StateBytes()
    offload_optimizer: Tier = "device"
    offload_parameters: Tier = "device"
    hpz: bool = False
    qwz: bool = False
    qgz: bool = False
    codec_block: int = 2048
    alignment: int = 1
    averaged_bytes: int | None = None

    def __post_init__(self) -> None:
        one_of("stage", self.stage, STAGES)
        at_least_one(
            world_size=self.world_size,
            ranks_per_node=self.per_node,
            accumulation=self.accumulation,
            codec_block=self.codec_block,
            alignment=self.alignment,
        )
        one_of("offload_optimizer", self.offload_optimizer, TIERS)
        one_of("offload_parameters", self.offload_parameters, TIERS)
        if self.world_size % self.per_node:
            raise PlanError(
                f"ranks_per_node: expected a divisor of world_size ({self.world_size}), got {self.per_node}"
            )
        if self.offload_optimizer != "device" and self.stage < 1:
            raise PlanError("offload_optimizer: expected stage 1 or higher, got stage 0; nothing is sharded there")
        for name, wanted in (
            ("offload_parameters", self.offload_parameters != "device"),
            ("hpz", self.hpz),
            ("qwz", self.qwz),
            ("qgz", self.qgz),
        ):
            if wanted and self.stage < 3:
                raise PlanError(f"{name}: expected stage 3, got stage {self.stage}, where parameters are not sharded")

    @property
    def per_node(self) -> int:
        """Ranks of one node."""
        return self.world_size if self.ranks_per_node is None else self.ranks_per_node

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.per_node

    def shard(self, elements: int, ranks: int | None = None) -> int:
        """Return the elements of one rank's shard of a unit with ``elements`` elements, padding included. ``ranks``:
        the number of ranks that the unit is sharded over, None for all.
        """
        block = (self.world_size if ranks is None else ranks) * self.alignment
        return -(-elements // block) * self.alignment

    def owned(self, elements: int, rank: int) -> int:
        """Return the elements of ``rank``'s shard, without padding, of a unit with ``elements`` elements that is
        sharded over all ranks.
        """
        shard = self.shard(elements)
        return min(max(elements - rank * shard, 0), shard)


def unit_sizes(units: int | tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Return the elements of each unit; a single number is a model of one unit. Raises `PlanError` for no units and for
    one with fewer than 1 element.
    """
    sizes = (units,) if isinstance(units, int) else tuple(units)
    if not sizes:
        raise PlanError("units: expected the elements of at least one unit, got none")
    for number, size in enumerate(sizes):
        at_least_one(**{"params" if isinstance(units, int) else f"units[{number}]": size})
    return sizes
