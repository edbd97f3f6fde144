"""Writes the new weights of shards: at the step, or in a thread beside the next forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from .._copy_streams import CopyStream
from ..errors import OffloadError
from ..trace import Trace
from ._journal import Journal
from ._lent_weights import LentWeights
from ._slices import KeptFragment
from ._speculations import Speculations, traced
from ._staging import StagedSlices

__all__ = ["ShardUpdates"]


class ShardUpdates:
    """The updates of one step, of the shards ``by_shard`` (their fragments, by name), until all of them are written.

    The new weights of a shard are its result, which ``speculations`` has computed in ``journal`` before the step, if
    that was right; else ``update_in_place(shards, grad_scale, absent)`` computes them. ``lent`` takes the weights back
    when they are written. ``copies`` copies results to an accelerator; ``thread`` runs what does not end within the
    step, and ``trace``, if not None, records it. The first update that fails in the thread ends all that follow, and
    every later wait raises its error until `forget_failure`.

    Attributes:
        copied: reached when the last copy of weights to an accelerator has ended; None before the first copy.
    """

    def __init__(
        self,
        by_shard: Mapping[str, Sequence[KeptFragment]],
        speculations: Speculations,
        journal: Journal,
        lent: LentWeights,
        copies: CopyStream,
        thread: ThreadPoolExecutor,
        update_in_place: Callable[[Collection[str], float, Collection[str]], None],
        trace: Trace | None,
    ) -> None:
        self._by_shard = by_shard
        self._speculations = speculations
        self._journal = journal
        self._lent = lent
        self._copies = copies
        self._thread = thread
        self._update_in_place = update_in_place
        self._trace = trace
        self._running: dict[str, Future[None]] = {}
        self._failure: OffloadError | None = None
        self._failed_update: str | None = None
        self.copied: torch.Event | None = None

    def begin(
        self, weights: Mapping[str, torch.Tensor], right: Collection[str], grad_scale: float, absent: Collection[str]
    ) -> None:
        """Begin a step's updates of the shards in ``weights`` (1-D, lent, by shard), in that order. Shards planned with
        ``read_at_once`` and those on an accelerator are written when this returns, the others later, by the thread.

        ``right``: the shards whose result from before the step may be taken. ``absent``: the fragments that are not
        updated. ``grad_scale`` multiplies the gradients of shards that are computed now.
        """
        for shard in right:
            if not self._is_in_place(shard):
                self._speculations.commit(shard)
        now = {shard: tensor for shard, tensor in weights.items() if self._is_written_now(shard, tensor)}
        self._write_now(now, right, grad_scale, absent)
        for shard, tensor in weights.items():
            if shard not in now:
                self._running[shard] = self._thread.submit(
                    self._write_in_thread, shard, tensor, shard in right, grad_scale, frozenset(absent)
                )

    def _is_written_now(self, shard: str, weights: torch.Tensor) -> bool:
        """Return whether a shard's ``weights`` are written within the step: they are on an accelerator, where work that
        is queued afterwards reads them, or are read at once.
        """
        return StagedSlices.is_away(weights) or any(f.shard.read_at_once for f in self._by_shard[shard])

    def _is_in_place(self, shard: str) -> bool:
        """Return whether a shard's weights are updated in place, without a master; then a result is only right if
        nobody has written into them, not even past torch.
        """
        return any(fragment.shard.in_place for fragment in self._by_shard[shard])

    def _take_result(self, shard: str, weights: torch.Tensor, right: bool) -> bool:
        """Return whether the speculated result of a shard is used: it was found ``right``, and ``weights``, where they
        are updated in place, still have the values that it was computed from. In place, this commits the result;
        `begin` has committed the others.
        """
        return right and (not self._is_in_place(shard) or self._speculations.commit_if_read(shard, weights))

    def _write_now(
        self, weights: Mapping[str, torch.Tensor], right: Collection[str], grad_scale: float, absent: Collection[str]
    ) -> None:
        """Copy the results found ``right`` to ``weights`` (by shard) and update the other shards; work that is queued
        on the accelerator from now on sees the new weights.
        """
        taken = {shard for shard in weights if self._take_result(shard, weights[shard], shard in right)}
        for shard in taken:
            for target, source in self._journal.pending_copies(shard, weights[shard]):
                self.copied = self._copies.copy(target, source)
        self._copies.join(self.copied)
        if len(taken) < len(weights):
            self._update_in_place([shard for shard in weights if shard not in taken], grad_scale, absent)
        for shard in weights:
            self._lent.give_back_lent(shard, dirty=True)

    def _write_in_thread(
        self, shard: str, weights: torch.Tensor, right: bool, grad_scale: float, absent: Collection[str]
    ) -> None:
        """Write a shard's new ``weights``: its result if that was found ``right``, else what is computed now; called in
        the thread. Record and raise OffloadError, with step and shard, if that fails; do nothing if the update of an
        earlier shard has failed.
        """
        if self._failure is not None:
            return
        number = max((fragment.step for fragment in self._by_shard[shard]), default=0)
        number += self._is_in_place(shard) or not right
        try:
            if not self._take_result(shard, weights, right):
                self._update_in_place([shard], grad_scale, absent)
                return
            with torch.no_grad(), traced(self._trace, shard):
                for target, source in self._journal.pending_copies(shard, weights):
                    target.copy_(source)
        except BaseException as error:
            self._failed_update = f"the update of '{shard}' in step {number}"
            self._failure = OffloadError(
                f"step {number}: the update of '{shard}' failed beside forward: {error}. Some of this rank's weights "
                "and states have taken that step and others not: load a saved state"
            )
            raise self._failure from error

    def wait_for(self, shard: str) -> None:
        """Wait until a shard's weights are written, and give them back to their owner; return at once if no update of
        the shard runs. Raise the recorded OffloadError if the update of any shard has failed.
        """
        future = self._running.get(shard)
        if future is not None:
            wait([future])
        if self._failure is not None:
            raise self._failure
        if future is not None:
            self._lent.give_back_lent(shard, dirty=True)
            self._running.pop(shard)

    def wait_for_all(self) -> None:
        """Wait for all updates, as `wait_for` does for one."""
        for shard in list(self._running):
            self.wait_for(shard)
        if self._failure is not None:
            raise self._failure

    def is_running(self, shard: str) -> bool:
        """Return whether the thread has not yet written the shard's weights, so that `wait_for` would block."""
        future = self._running.get(shard)
        return future is not None and not future.done()

    def failed_update(self) -> str | None:
        """Wait for all updates; return shard and step of the one that failed, as words for messages, or None."""
        wait(self._running.values())
        return self._failed_update

    def settle(self) -> None:
        """Wait for all updates, failed or not, without raising, and give back the weights of all shards."""
        wait(self._running.values())
        for shard in self._by_shard:
            self._lent.give_back_lent(shard, dirty=True)
        self._running.clear()

    def forget_failure(self) -> None:
        """Discard the error of an update that failed, so that new updates run."""
        self._failure = self._failed_update = None
