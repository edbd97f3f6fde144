"""Updates of shards that begin before the step, and the check at the step that what they assume is true."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ..trace import Trace
from ._journal import Journal
from ._overlap_rate import OverlapRate
from ._slices import KeptFragment
from ._step import count_step

__all__ = ["Assumed", "Options", "Speculations", "traced"]

Options = Sequence[Mapping[str, Any]]


class Assumed(NamedTuple):
    """What an update was computed with, besides its gradient and its states: the parameter groups' ``options`` (copies,
    which nothing changes), and ``grad_scale``, the factor of the gradients.
    """

    options: Options
    grad_scale: float

    def equals(self, other: Assumed) -> bool:
        """Return whether both have the same factor, and options of the same names and values."""
        return (
            self.grad_scale == other.grad_scale
            and len(self.options) == len(other.options)
            and all(
                one.keys() == two.keys() and all(_are_same_options(value, two[key]) for key, value in one.items())
                for one, two in zip(self.options, other.options, strict=True)
            )
        )


class Speculations:
    """The updates of one step that were begun before it, in ``thread``, into ``journal``; at most one per shard.

    ``fragments``: those of each shard. ``rate`` gets the counts. ``trace``, if not None, records the computation. Per
    shard: `begin` if `may_begin`; then, at the step, `validate` and, if that is True, `commit` or `commit_if_read`. Or
    `drop`, before anything that the update reads is written.
    """

    def __init__(
        self,
        journal: Journal,
        thread: Executor,
        fragments: Mapping[str, Sequence[KeptFragment]],
        rate: OverlapRate,
        trace: Trace | None,
    ) -> None:
        self._journal = journal
        self._thread = thread
        self._fragments = fragments
        self._rate = rate
        self._trace = trace
        self._begun: dict[str, tuple[Future[None], Assumed]] = {}

    @property
    def begun(self) -> list[str]:
        """Return the names of the shards whose update was begun and neither validated nor dropped."""
        return list(self._begun)

    def may_begin(self, shard: str) -> bool:
        """Return whether a shard's update can begin before the step: the journal has memory for it, its states exist
        already, and speculation is on (`OverlapRate.is_on`).
        """
        fragments = self._fragments[shard]
        return self._rate.is_on and shard in self._journal and bool(fragments) and _are_settled(fragments)

    def begin(
        self,
        shard: str,
        gradient: torch.Tensor,
        weights: torch.Tensor | None,
        assumed: Assumed,
        events: Sequence[torch.Event | None],
    ) -> None:
        """Begin a shard's update from ``gradient``, and from ``weights`` if these are updated in place (both 1-D, in
        host memory); ``assumed``: its other inputs. The computation waits for the copies whose ends ``events`` mark
        (None: nothing to wait for).
        """
        future = self._thread.submit(self._compute, shard, gradient, weights, assumed, events)
        self._begun[shard] = future, assumed

    def _compute(
        self,
        shard: str,
        gradient: torch.Tensor,
        weights: torch.Tensor | None,
        assumed: Assumed,
        events: Sequence[torch.Event | None],
    ) -> None:
        """Wait for ``events``, the ends of copies that bring the inputs, then compute a shard's new states and weights
        from ``gradient`` and ``assumed`` in the journal; runs in the thread. ``weights``: as they are now, if they are
        updated in place, else None.
        """
        for event in events:
            if event is not None and not event.query():
                event.synchronize()
        with torch.no_grad(), traced(self._trace, shard):
            self._journal.compute(shard, assumed.options, gradient, weights, assumed.grad_scale)

    def validate(self, shard: str, actual: Assumed, absent: Collection[str]) -> bool:
        """Return whether the new states of a shard are computed and right, so that `commit` may follow: they were
        computed with ``actual``, the inputs of the step, and no fragment of the shard is named in ``absent``, those
        that the step leaves out. Otherwise they are dropped.

        Waits for what is being computed, and drops what has not begun. Warns of a computation that failed. No state
        changes here.
        """
        future, assumed = self._begun.get(shard, (None, actual))
        computed = future is not None and not future.cancel()
        if future is not None and computed:
            wait([future])
        self._begun.pop(shard, None)
        if future is None or not computed:
            self._rate.left += 1
            return False
        fragments = self._fragments[shard]
        if (error := future.exception()) is not None:
            text = f"'{shard}': the update beside backward failed and is computed again: {error}"
            warnings.warn(text, stacklevel=3)
        elif assumed.equals(actual) and _are_settled(fragments) and not any(f.name in absent for f in fragments):
            return True
        self._rate.redone += 1
        return False

    def commit(self, shard: str) -> None:
        """Replace a shard's states in its tier by those computed ahead of the step, and add 1 to its fragments' steps.
        Only for a shard that `validate` has accepted.
        """
        self._journal.commit(shard)
        count_step(self._fragments[shard])
        self._rate.committed += 1

    def commit_if_read(self, shard: str, weights: torch.Tensor) -> bool:
        """Do `commit` if ``weights`` (1-D), which are updated in place, are unchanged since the computation has read
        them; return whether they are.
        """
        if self._journal.has_read(shard, weights):
            self.commit(shard)
            return True
        self._rate.redone += 1
        return False

    def drop(self, shard: str) -> bool:
        """Drop the update that was begun for a shard, waiting for it if it is being computed; return whether there was
        one.
        """
        future, _ = self._begun.get(shard, (None, None))
        if future is not None and not future.cancel():
            wait([future])
        self._begun.pop(shard, None)
        return future is not None


def traced(trace: Trace | None, shard: str) -> AbstractContextManager[None]:
    """Return a context manager that records the time inside its block as the computation of a shard's update; one that
    does nothing if ``trace`` is None.
    """
    return nullcontext() if trace is None else trace.span("compute", shard)


def _are_settled(fragments: Sequence[KeptFragment]) -> bool:
    """Return whether all states of the fragments exist and match the weights."""
    return all(fragment.is_settled for fragment in fragments)


def _are_same_options(x: Any, y: Any) -> bool:
    """Return whether two values of an option are equal; tensors are equal if their values and dtypes are."""
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.dtype == y.dtype and x.equal(y)
    return bool(x == y)
