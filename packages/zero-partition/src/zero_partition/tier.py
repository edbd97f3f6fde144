"""The interface of tiers that keep masters, moments and gradients, and update the weights."""

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
    """Keeps the masters, moments and gradients of this rank's shards, and updates the weights.

    Shards are named by their unit, fragments by their parameter (at stages 1 to 3, where a rank has one of each). A
    step: `borrow_gradient` and `give_back_gradient` (or `add_gradient`) once per reduction, `gradient` to read or
    change it, `step` unless it is skipped, `clear_gradients`. The weights are borrowed from a `Residency`.

    Attributes:
        writes: number of writes to masters or moments by anything but a step.
    """

    @property
    def writes(self) -> int:
        """Number of writes to masters or moments since the tier was made, without those of steps."""

    def borrow_gradient(self, shard: str, /) -> tuple[torch.Tensor, bool]:
        """Return (memory, holds_sum): host memory to reduce a gradient into (1-D, the shard's elements), and whether it
        holds the sum of earlier gradients, to which the caller has to add.

        The memory is the caller's until `give_back_gradient`; without a sum it has any values.
        """

    def give_back_gradient(self, shard: str, /) -> None:
        """End `borrow_gradient`, as the memory holds the shard's gradient now."""

    def add_gradient(self, shard: str, gradient: torch.Tensor, /) -> Sequence[torch.Tensor]:
        """Add a shard's reduced gradient (1-D, on any device) to the sum of earlier ones. Return the sum on that
        device, in consecutive 1-D parts, which are valid until the next gradient of the shard."""

    def join_gradients(self) -> None:
        """Make device work that is queued from now on wait for gradients that are still being copied to the tier. The
        host does not wait."""

    def has_gradient(self, shard: str, /) -> bool:
        """Return whether the shard has received a gradient since `clear_gradients`."""

    def gradient(self, shard: str, /, *, dirty: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Return a context that gives the shard's gradient in host memory (1-D); ``dirty``: the caller will change it.

        Only if `has_gradient`.
        """

    def clear_gradients(self) -> None:
        """Drop all gradients."""

    def step(self, *, grad_scale: float = 1.0, absent: Collection[str] = ()) -> None:
        """Update masters, moments and weights of all shards that have a gradient. May return before that is done;
        `finish` waits.

        ``grad_scale``: factor by which the gradients are multiplied. ``absent``: names of fragments to leave out.
        """

    def expect(self, grad_scale: float, /) -> None:
        """Announce the ``grad_scale`` that the next `step` will get unless gradients are clipped, for tiers that begin
        the update before `step` is called."""

    def await_update(self, shard: str, /) -> None:
        """Wait, before ``shard`` is acquired, until the residency has the weights of it that forward reads next.

        Does not wait for weights that are published only after `finish`. Raises the error of an update that failed.
        """

    def is_updating(self, shard: str, /) -> bool:
        """Return whether `await_update` would wait, so that the shard cannot be prefetched."""

    def half_written(self) -> str | None:
        """Wait for an update that still runs after `step`. If one has failed in the middle and left weights and states
        of two steps, return words for it, for messages; else None. Does not raise its error."""

    def finish(self) -> bool:
        """Wait for an update that still runs after `step`; return whether there was one, so that weights have
        changed."""

    def weights_changed(self, shard: str, /) -> None:
        """Record that something other than `step` wrote the weights of ``shard``.

        Before its masters are used next, those that do not round to the weights are replaced by the weights.
        """

    def kinds(self, fragment: str, /) -> tuple[str, ...]:
        """Return the kinds of values that the tier keeps for a fragment once it has stepped: ``master`` unless the
        weights themselves are updated, its moments, and ``<moment>_scale`` of 8-bit ones."""

    def held(self, fragment: str, /) -> tuple[int, dict[str, torch.dtype]]:
        """Return (steps, dtypes): the number of steps that a fragment has taken, and by kind the dtype of each value
        that the tier keeps for it now, which may be none.

        A kind ``<moment>_scale`` has one element for every 256 elements of the moment.
        """

    def numbers(self, fragment: str, /) -> Mapping[str, torch.Tensor]:
        """Return the numbers, by name, that an optimizer without a kernel keeps of a fragment besides its moments and
        ``step``, as 0-D tensors. Before the fragment's first step only the names are meaningful."""

    def states(
        self, fragments: Collection[str] | None = None, /, *, stale_masters: bool = False, decoded: bool = False
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (fragment, {kind: value}): ``step`` and `numbers` as 0-D tensors, the other values as 1-D copies on the
        host.

        ``fragments``: names, None for all; those without any values are left out. A master whose weights were written
        after it is left out unless ``stale_masters``. ``decoded``: give 8-bit moments as float32 values, without
        scales.
        """

    def write(self, states: Mapping[str, Mapping[str, Any]], /) -> None:
        """Replace the values given in ``states``, by fragment and kind: 1-D tensors, and ``step`` as a number. Other
        kinds and fragments stay.

        A given master counts as equal to the present weights.
        """

    def restart(self, fragments: Collection[str], /) -> None:
        """Drop the moments and the step count of the given fragments; masters stay."""

    def reset(self) -> None:
        """Drop the masters, the moments and the step counts of all fragments, as if there had been no step; the next
        step begins from the weights."""

    def flush(self) -> None:
        """Wait until everything that was written has reached its storage (files, if the tier has any)."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that the tier holds now, in memory and in files, by a name for what holds them."""

    def close(self) -> None:
        """Free everything, memory and files. The tier cannot be used afterwards."""


@dataclass(frozen=True)
class ShardNeeds:
    """Description, for a `StateTier`, of one unit's shard whose states it has to keep.

    ``rank``: index of the shard in ``layout``. ``gradient_dtype``: the dtype in which gradients are accumulated.
    ``stays_gathered``: the unit is never released, so its weights are needed as soon as a step has returned.
    """

    layout: UnitLayout
    plan: UnitPlan
    rank: int
    gradient_dtype: torch.dtype
    stays_gathered: bool


class MakeStates(Protocol):
    """Makes the tier for this rank's shards, before the shards exist."""

    def __call__(self, shards: Sequence[ShardNeeds], residency: Residency, /) -> StateTier:
        """Return the tier for the states of ``shards``, whose weights ``residency`` will keep."""
