"""The seam behind which masters, moments and gradients live on some tier."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .layout import UnitLayout
from .residency import Residency
from .units import UnitPlan


class StateTier(Protocol):
    """Keeps what the optimizer needs of this rank's shards, and updates them.

    Shards go by their unit's name, fragments by their parameter's name (below stage 0 a rank has one of each). A step:
    `borrow_gradient` and `give_back_gradient` (or `add_gradient`) once per reduction, `gradient` to look at them,
    `step` unless it is skipped, `clear_gradients`. The weights are lent by `Residency`.

    Attributes:
        writes: how often something else than a step has written masters or moments.
    """

    @property
    def writes(self) -> int: ...

    def borrow_gradient(self, shard: str, /) -> tuple[torch.Tensor, bool]:
        """Host memory to reduce into (1-D, the shard's elements), and whether it holds the sum so far."""

    def give_back_gradient(self, shard: str, /) -> None:
        """Give back what was borrowed: it holds the gradient now."""

    def add_gradient(self, shard: str, gradient: torch.Tensor, /) -> None:
        """Add a shard's reduced gradient (1-D, any device) to the sum so far."""

    def has_gradient(self, shard: str, /) -> bool:
        """Return whether there is a gradient since `clear_gradients`."""

    def gradient(self, shard: str, /, *, dirty: bool = False) -> AbstractContextManager[torch.Tensor]:
        """A context with the gradient in host memory; ``dirty``: it will be changed."""

    def clear_gradients(self) -> None:
        """Forget all gradients."""

    def step(self, *, grad_scale: float = 1.0, absent: Collection[str] = ()) -> None:
        """Update all shards that have a gradient, but for the fragments that are ``absent``; write the weights."""

    def finish(self) -> bool:
        """Wait for an update that still runs after `step`; whether there was one, and so the weights are newer now."""

    def weights_changed(self, shard: str, /) -> None:
        """Somebody else wrote a shard's weights: masters that do not round to them take them over."""

    def kinds(self, fragment: str, /) -> tuple[str, ...]:
        """Return the kinds that are kept for a fragment: ``master`` unless it is updated in place, and its moments."""

    def held(self, fragment: str, /) -> tuple[int, dict[str, torch.dtype]]:
        """Steps taken by a fragment, and the dtypes of what is kept for it now, by kind; a kind ``<moment>_scale`` has
        one item for every 256 elements."""

    def states(
        self, fragments: Collection[str] | None = None, /, *, stale_masters: bool = False, decoded: bool = False
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (fragment, copies of what is kept, 1-D in host memory, and ``step``); those without anything are left
        out, and masters whose weights were changed since, unless ``stale_masters`` are asked for. ``decoded``: 8-bit
        moments as the float32 values that they stand for, without scales."""

    def write(self, states: Mapping[str, Mapping[str, Any]], /) -> None:
        """Replace what is kept for the fragments named: any of their kinds, and ``step``."""

    def restart(self, fragments: Collection[str], /) -> None:
        """Have the fragments named begin anew with their next step; masters stay."""

    def reset(self) -> None:
        """Begin anew, as if there had been no step."""

    def flush(self) -> None:
        """Return when everything is on its tier."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by kind."""

    def close(self) -> None:
        """Let everything go."""


@dataclass(frozen=True)
class ShardNeeds:
    """The needs of one unit's shard on this rank from a `StateTier`: its layout, plan and rank, and the dtype in which
    gradients are kept."""

    layout: UnitLayout
    plan: UnitPlan
    rank: int
    gradient_dtype: torch.dtype


class MakeStates(Protocol):
    """Makes the tier for this rank's shards, before any of them exists; ``residency`` will lend their weights."""

    def __call__(self, shards: Sequence[ShardNeeds], residency: Residency, /) -> StateTier: ...
