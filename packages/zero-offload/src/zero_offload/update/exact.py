"""An update that runs beside backward and the next forward, with the bits of one that does not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .._copy_streams import CopyStream, compute_device
from ..budget import HostBudget
from ..errors import OffloadError
from ..sealed import Sealed
from ..trace import Trace
from ._gradients import CallerGradients, CollectedGradients, HostGradients, gradient_bytes, known_shard
from ._journal import Journal, chosen_shards, journal_bytes
from ._lent_weights import LentWeights
from ._mirror import copy_options
from ._overlap_rate import OverlapRate
from ._rules import OptimizerLike, find_rule
from ._shard_updates import ShardUpdates
from ._speculations import Assumed, Options, Speculations
from .plans import BoundedWeights, ShardPlan, Weights
from .tier_options import TierOptions
from .update import OffloadedUpdate

__all__ = ["ExactUpdate"]


class ExactUpdate(OffloadedUpdate):
    """An `OffloadedUpdate` with states and gradients in host memory whose arithmetic runs beside backward and the next
    forward; weights and states have the bits of an `OffloadedUpdate`, at every step.

    [Note: speculate, validate, commit] When a shard's gradient is complete, a thread computes the new states and
    weights beside the old ones, in a `Journal`, with the factor that `expect` has announced. `step` takes a result only
    if everything it assumed has come true: the factor, the gradient, the options, the fragments; else the update is
    computed from the old states, which are untouched. With several gradients per step, a shard's is complete when there
    are as many as in the step before.

    [Note: finish beside forward] Where weights are in host memory, `step` returns before they are written. The thread
    updates the shards in the order in which `await_update` asked for them after the step before, copying results that
    were taken, computing the others in place. `await_update` waits for one shard; methods that read or write states
    wait for all. Weights on an accelerator, and shards planned with ``read_at_once``, are written before `step`
    returns.

    Arguments are those of `OffloadedUpdate`: ``shards`` are updated by ``optimizer`` with the options that ``groups``
    returns at every step, ``weights`` lends what forward reads on ``device``, ``tier_options`` says where states are,
    ``budget`` collects the needs, ``trace`` records transfers. ``journal_nbytes`` bounds the journal (None: no bound);
    shards that do not fit into it, the first ones of ``shards``, are updated at the step. ValueError for a tier with
    files, for weights in files, and for a ``ratio`` below 1 on an accelerator.

    If an update fails after `step` has returned, every later call raises OffloadError with step and shard; states are
    half updated then, until `reset`. A speculation that fails changes nothing: the update is computed again.

    Attributes:
        rate: counts of what speculation has achieved.
    """

    def __init__(
        self,
        shards: Sequence[ShardPlan],
        optimizer: OptimizerLike,
        groups: Callable[[], Options],
        weights: Weights,
        tier_options: TierOptions | None = None,
        *,
        journal_nbytes: int | None = None,
        device: torch.device | str | None = None,
        budget: HostBudget | None = None,
        trace: Trace | None = None,
    ) -> None:
        device, tier_options = compute_device(device), tier_options or TierOptions()
        tier_options.check_device(device, optimizer, beside=True)
        if tier_options.tier != "host":
            raise ValueError(f"tier: expected 'host' for an update beside backward, got {tier_options.tier!r}")
        if isinstance(weights, BoundedWeights):
            raise ValueError("weights: expected them in memory for an update beside backward, got them in files")
        budget, rule = HostBudget() if budget is None else budget, find_rule(optimizer)
        self._live_groups = groups
        self._options = copy_options(groups())
        nbytes = {s.name: journal_bytes(s, rule, self._options, tier_options.state_dtype) for s in shards}
        journaled = chosen_shards(shards, nbytes, journal_nbytes)
        budget.need("gradients", gradient_bytes(shards))
        budget.need("journal of updates beside backward", sum(nbytes[shard.name] for shard in journaled))
        self._lent = LentWeights(weights)
        super().__init__(
            shards,
            optimizer,
            lambda: self._options,
            self._lent,
            tier_options,
            gradients="caller",
            device=device,
            budget=budget,
            trace=trace,
        )
        pin = tier_options.pin and device.type != "cpu"
        self._gradients = HostGradients(shards, (), device, pin=pin, trace=trace)
        self._journal = Journal(rule, journaled, self._parts.slices, self._parts.tier, pin=pin)
        self._copies = CopyStream(device, trace, "weights, device")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-offload exact update")
        self._touched: Future[None] | None = self._thread.submit(self._journal.touch)
        self._expected = 1.0
        self._reductions: dict[str, int] = {}
        self._usual: dict[str, int] = {}
        self._asked: dict[str, None] = {}
        self.rate = OverlapRate()
        self._speculations = Speculations(self._journal, self._thread, self._by_shard, self.rate, trace)
        self._updates = ShardUpdates(
            self._by_shard,
            self._speculations,
            self._journal,
            self._lent,
            self._copies,
            self._thread,
            self._update_in_place,
            trace,
        )
        self._stop = weakref.finalize(self, _stop, self._thread, self._gradients, self._journal)

    # Gradients

    def borrow_gradient(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return host memory (1-D) to reduce a shard's gradient into, and whether it holds the sum of earlier
        gradients; if not, its content is arbitrary. Waits for the shard's update of the step before; what was computed
        from the gradient beforehand is discarded. ShardError for an unknown shard, OffloadError after `close`.
        """
        self._prepare_change(shard)
        return super().borrow_gradient(shard)

    def give_back_gradient(self, shard: str) -> None:
        """Take over the gradient in the borrowed memory; if the gradient is complete now, begin the shard's update."""
        super().give_back_gradient(shard)
        self._speculate(shard)

    def add_gradient(self, shard: str, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Add a shard's gradient (1-D, on any device) to the sum; return the sum on that device, in 1-D parts that
        follow each other. If the sum is complete now, begin the shard's update. The tensor may be freed at once, but
        not written before `flush` or the step. ShardError for an unknown shard.
        """
        self._prepare_change(shard)
        total = super().add_gradient(shard, gradient)
        self._speculate(shard)
        return total

    def has_gradient(self, shard: str) -> bool:
        """Return whether a shard has a gradient since `clear_gradients`."""
        return self._gradients.has(shard)

    def gradient(self, shard: str, *, dirty: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Return a context manager that yields a shard's gradient in host memory (1-D), to be read or, with ``dirty``,
        changed. With ``dirty`` it waits, on entry, for an update that `step` has left running with the gradient, and
        discards what was computed from it beforehand. ShardError on entry if there is none.
        """
        return self._changed_gradient(shard) if dirty else super().gradient(shard)

    @contextmanager
    def _changed_gradient(self, shard: str) -> Iterator[torch.Tensor]:
        """Return the context manager of `gradient` with ``dirty``: it waits until nothing reads the shard's gradient
        any more, then yields it to be changed.
        """
        self._prepare_change(shard)
        with super().gradient(shard, dirty=True) as tensor:
            yield tensor

    def clear_gradients(self) -> None:
        """Discard all gradients, and what was computed from them beforehand. Updates that `step` has left running are
        not disturbed.
        """
        if self._reductions:
            self.rate.note(replay=True)  # the step was skipped
            self.rate.redone += len(self._speculations.begun)
        self._discard(self._speculations.begun)
        self._begin_collecting()
        self._gradients.clear()

    def _begin_collecting(self) -> None:
        """Keep how many gradients each shard has had for this step, by which those of the next step count as complete,
        and begin to count anew.
        """
        self._usual, self._reductions = self._reductions or self._usual, {}

    def _collected_gradients(self) -> CollectedGradients:
        """Return the object that collects the gradients; OffloadError after `close`."""
        self._check_open()
        return self._gradients

    def _prepare_change(self, shard: str) -> None:
        """Make it safe to change a shard's gradient or weights: wait for the shard's update, and drop what was computed
        from them beforehand. ShardError for an unknown shard.
        """
        known_shard(self._by_shard, shard)
        self._updates.wait_for(shard)
        self._discard([shard])

    # Speculation

    def expect(self, grad_scale: float) -> None:
        """Announce the ``grad_scale`` of the next `step`, with which updates are computed beforehand: 1 over the loss
        scale. A step that clips will have another one.
        """
        self._expected = grad_scale

    def _speculate(self, shard: str) -> None:
        """Count a gradient of a shard. If there are as many now as in the step before, begin the shard's update,
        provided that the journal has memory for it and speculation is on.
        """
        self._reductions[shard] = self._reductions.get(shard, 0) + 1
        fragments = self._by_shard[shard]
        complete = self._reductions[shard] >= self._usual.get(shard, self._reductions[shard] + 1)
        if not (complete and self._speculations.may_begin(shard)):
            return
        weights = self._lent.lend(shard) if fragments[0].shard.in_place else None
        events = [self._gradients.arriving(shard), self._updates.copied]
        gradient = self._gradients.memory_of(shard)
        options = copy_options(self._live_groups())
        self._speculations.begin(shard, gradient, weights, Assumed(options, self._expected), events)

    def _discard(self, shards: Collection[str]) -> None:
        """Drop the updates of these shards that were begun before the step, waiting for one that is being computed, and
        give back their lent weights.
        """
        for shard in shards:
            if self._speculations.drop(shard):
                self._lent.give_back_lent(shard, dirty=False)

    # The step

    @torch.no_grad()
    def step(
        self,
        *,
        grad_scale: float = 1.0,
        absent: Collection[str] = (),
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Update every fragment whose shard has a gradient, except those named in ``absent``, with the gradients times
        ``grad_scale``; may return before that is done.

        OffloadError, once, if the system could not provide memory for updates beforehand; the step may be tried again.
        ValueError if ``gradients`` are given, since they are collected, and for options of a group that cannot be
        updated with; nothing was changed then. If an exception ends this call in the middle, KeyboardInterrupt for one,
        steps and reads of states are refused until `reset`, as after any step that failed.
        """
        self.finish()
        if gradients is not None:
            raise ValueError("step(gradients=…): expected none, as they are collected during backward")
        self._options = copy_options(self._live_groups())
        self._check_step()
        self._check_touched()
        for number, group in enumerate(self._options):
            self._check_group(number, group)
        self.rate.note(replay=grad_scale != self._expected)
        self._begin_collecting()
        shards = [shard for shard in dict.fromkeys((*self._asked, *self._by_shard)) if self._gradients.has(shard)]
        self._asked.clear()
        self._gradients.flush()
        weights = {shard: self._lent.lend(shard) for shard in shards}
        actual = Assumed(self._options, grad_scale)
        right = {shard for shard in shards if self._speculations.validate(shard, actual, absent)}
        self._failed = True
        self._updates.begin(weights, right, grad_scale, absent)
        self._failed = False

    def _check_touched(self) -> None:
        """Raise OffloadError, once, if providing the journal's memory has failed; do not wait if it is still
        under way.
        """
        if self._touched is not None and self._touched.done():
            touched, self._touched = self._touched, None
            if (error := touched.exception()) is not None:
                raise OffloadError(f"memory for updates beside backward could not be provided: {error}") from error

    def _update_in_place(self, shards: Collection[str], grad_scale: float, absent: Collection[str]) -> None:
        """Update these shards in place from their gradients, as `step` does, without its checks; ``absent`` fragments
        are left out.
        """
        given = self._parts.gradients
        if isinstance(given, CallerGradients):
            given.give({shard: self._gradients.memory_of(shard) for shard in shards})
            with torch.no_grad():
                self._update_fragments(grad_scale, absent)
            given.clear()

    def await_update(self, shard: str) -> None:
        """Wait until the weights of a shard are those of the last step; return at once if no update of the shard runs.
        The shards that are asked for first are updated first at the next step. OffloadError, with step and shard, if an
        update has failed since `step` returned.
        """
        self._asked.setdefault(shard)
        self._updates.wait_for(shard)

    def is_updating(self, shard: str) -> bool:
        """Return whether an update of the shard still runs, so that `await_update` would wait."""
        return self._updates.is_running(shard)

    def finish(self) -> bool:
        """Wait for all updates that `step` has left running, and raise the error of one that failed. Return False:
        weights are read through `await_update`, so there is nothing to publish again.
        """
        self._updates.wait_for_all()
        return False

    def half_written(self) -> str | None:
        """Wait for the updates that `step` has left running. If a step, or one of these updates, failed in the middle,
        so that some weights and states have taken the step and others not, return words for messages about that (with
        step and shard of the update); else None.
        """
        return self._updates.failed_update() or super().half_written()

    def weights_changed(self, shard: str) -> None:
        """Wait for the shard's update, then record that the shard's weights were changed from outside: the next step
        replaces each master that does not round to its weight. ShardError for an unknown shard.
        """
        self._prepare_change(shard)
        super().weights_changed(shard)

    # States

    def held(self, fragment: str) -> tuple[int, dict[str, torch.dtype]]:
        """`finish`, then return the steps taken by a fragment, and the dtype of each kind of state that the tier holds
        of it now. ShardError for an unknown fragment.
        """
        self.finish()
        return super().held(fragment)

    def states(
        self, fragments: Collection[str] | None = None, *, stale_masters: bool = False, decoded: bool = False
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """`finish`, then return an iterator of (fragment's name, state) for each fragment (of those named, or all) that
        has any state; results computed beforehand are never among them. A state has copies in host memory: tensors
        (1-D) by kind, and ``step``. ``stale_masters``: include masters that are out of date because weights were
        changed; ``decoded``: 8-bit moments as float32.
        """
        self.finish()
        return super().states(fragments, stale_masters=stale_masters, decoded=decoded)

    def write(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """`finish`, discard what was computed beforehand, and replace states of the fragments named. ``states``: for
        each fragment's name its tensors by kind (1-D), and ``step``; kinds that are not given stay. ValueError names a
        state that does not fit; nothing was changed then.
        """
        self._begin_writing()
        super().write(states)

    def restart(self, fragments: Collection[str]) -> None:
        """`finish`, discard what was computed beforehand, and reset the moments and step counts of the fragments named;
        their masters stay. ShardError for an unknown fragment; none is reset then.
        """
        self._begin_writing()
        super().restart(fragments)

    def reset(self) -> None:
        """Discard all states and step counts, and the error of an update that failed; the next step starts from the
        weights. Gradients stay.
        """
        self._discard(self._speculations.begun)
        self._updates.settle()
        self._updates.forget_failure()
        self._options = copy_options(self._live_groups())
        self._failed = True  # until the tier is reset, it may share memory with the journal
        self._journal.reset()
        super().reset()

    def _begin_writing(self) -> None:
        """Prepare for writing states: wait for updates that run, and drop those that were begun before their step."""
        self.finish()
        self._discard(self._speculations.begun)
        self._options = copy_options(self._live_groups())

    def seal(self, *, durable: bool = True) -> Sealed | None:
        """`finish`, then return None: no state is in files."""
        self.finish()
        return super().seal(durable=durable)

    # Accounts

    @property
    def plan(self) -> Mapping[str, int]:
        """Return the bytes held from construction on: ``states``, ``gradients`` and ``staging`` (with the journal) in
        host memory, ``device`` on the device; ``ring`` and ``nvme`` are 0.
        """
        return self._with_own_bytes(super().plan)

    def memory(self) -> dict[str, int]:
        """Return the bytes held now: ``states``, ``gradients`` and ``staging`` (with the journal) in host memory,
        ``device`` on the device; ``ring`` and ``nvme`` are 0.
        """
        return self._with_own_bytes(super().memory())

    def _with_own_bytes(self, others: Mapping[str, int]) -> dict[str, int]:
        """Return ``others``, bytes by what holds them, with those of this update's gradients and journal added."""
        gradients = others["gradients"] + self._gradients.memory()["gradients"]
        return {**others, "gradients": gradients, "staging": others["staging"] + self._journal.nbytes}

    def report(self, name: str) -> list[str]:
        """Return lines of text, each beginning with ``name``: on what was written to drives, and on how much was
        computed beforehand.
        """
        return [*super().report(name), f"{name}: {self.rate.text()}"]

    def flush(self) -> None:
        """`finish`, then block until all gradients have arrived in host memory."""
        self.finish()
        self._gradients.flush()
        super().flush()

    def close(self) -> None:
        """Wait for the updates that `step` has left running, end the thread, free the memory. May be called twice."""
        self._copies.synchronize()
        self._discard(self._speculations.begun)
        self._updates.settle()
        self._stop()
        super().close()


def _stop(thread: ThreadPoolExecutor, gradients: HostGradients, journal: Journal) -> None:
    """End the thread and free the memory of gradients and journal. Waits for the update that runs; updates that are
    queued never run, and `Journal.touch` stops early.
    """
    journal.stop_touching()
    thread.shutdown(wait=True, cancel_futures=True)
    gradients.close()
    journal.close()
