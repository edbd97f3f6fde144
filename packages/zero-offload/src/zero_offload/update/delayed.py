"""An update that runs beside the next forward and backward, one step late."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._copy_streams import CopyStream, compute_device
from .._protocols import PathUse
from .._wear import wear_report
from ..budget import HostBudget
from ..sealed import Sealed
from ..trace import Trace
from ._gradients import HostGradients, borrowed_gradient, gradient_bytes, known_shard
from ._mirror import Mirror, copy_options
from ._rules import OptimizerLike
from .plans import ShardPlan, Weights, check_shard_tensor
from .tier_options import TierOptions
from .update import OffloadedUpdate

__all__ = ["DelayedUpdate"]


class DelayedUpdate:
    """An `OffloadedUpdate` whose step runs in a thread of its own while the next gradients are computed (the one-step
    delayed parameter update of ZeRO-Offload, arXiv 2101.06840, section 5.3).

    With m the masters, u the optimizer's rule and g(w) the gradient at weights w, step t computes m[t+1] = u(m[t],
    g(w[t])), and the weights that forward reads next are w[t+1] = m[t] rounded: every gradient is computed one update
    earlier than it is applied. The trajectory differs from that of the optimizer without delay; it is bit-identical to
    that of the same kernels fed with these gradients.

    Arguments and methods are those of `OffloadedUpdate` with gradients in host memory: ``shards`` are updated by
    ``optimizer`` with the options that ``groups`` returns at every step, ``weights`` lends what forward reads on
    ``device``, ``tier_options`` says where states are, ``budget`` collects the needs, ``trace`` records transfers. Two
    sets of gradients and a copy of all weights are held in host memory. `step` waits for the previous step, writes its
    weights, and returns while its own runs; `finish`, and every method that reads or writes states, waits for that one
    too. The method that waits for a failed step raises its error.
    """

    def __init__(
        self,
        shards: Sequence[ShardPlan],
        optimizer: OptimizerLike,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        weights: Weights,
        tier_options: TierOptions | None = None,
        *,
        device: torch.device | str | None = None,
        budget: HostBudget | None = None,
        trace: Trace | None = None,
    ) -> None:
        device = compute_device(device)
        (tier_options or TierOptions()).check_device(device, optimizer, beside=True)
        budget = HostBudget() if budget is None else budget
        budget.need("two sets of gradients", 2 * gradient_bytes(shards))
        budget.need("weights that wait for their step", Mirror.bytes_of(shards))
        pin = (tier_options or TierOptions()).pin and device.type != "cpu"
        self._groups = groups
        self._options: Sequence[Mapping[str, Any]] = copy_options(groups())
        self._weights = weights
        self._plans = {shard.name: shard for shard in shards}
        self._mirror = Mirror()
        self._inner = OffloadedUpdate(
            shards,
            optimizer,
            lambda: self._options,
            self._mirror,
            tier_options,
            gradients="caller",
            device="cpu",
            budget=budget,
            trace=trace,
        )
        self._mirror.allocate(shards, pin=pin)
        self._changed = set(self._plans)
        self._sets = [HostGradients(shards, (), device, pin=pin, trace=trace) for _ in range(2)]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-offload delayed update")
        self._copies = CopyStream(device, trace, "weights, device")
        self._copied: torch.Event | None = None
        self._running: Future[None] | None = None
        self._updated_shards: set[str] = set()
        self._changed_unreported: set[str] = set()
        self._finalizer = weakref.finalize(self, _stop_and_close, self._thread, self._inner)

    @property
    def writes(self) -> int:
        """Return the number of calls of `write`, `restart` and `reset` so far."""
        return self._inner.writes

    # Gradients

    def borrow_gradient(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return host memory (1-D) to reduce a shard's gradient for the next step into, and whether it holds the sum of
        earlier gradients; if not, its content is arbitrary. ShardError if the shard is not updated here.
        """
        return self._sets[0].borrow(shard)

    def give_back_gradient(self, shard: str) -> None:
        """Take over the gradient that was written to the borrowed memory: the shard has a gradient for the next step
        now.
        """
        self._sets[0].give_back(shard, dirty=True)

    def add_gradient(self, shard: str, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Add a shard's gradient (1-D, on any device) to the sum for the next step; return that sum on its device, in
        1-D parts that follow each other. The tensor may be freed at once, but not written before `step`. ShardError if
        the shard is not updated here.
        """
        return self._sets[0].add(shard, gradient)

    def join_gradients(self) -> None:
        """Make the accelerator's current stream wait for the gradients for the next step that are on their way to host
        memory; the host does not wait.
        """
        self._sets[0].join()

    def has_gradient(self, shard: str) -> bool:
        """Return whether a shard has a gradient for the next step; those that a running step uses do not count."""
        return self._sets[0].has(shard)

    def gradient(self, shard: str, *, dirty: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Return a context manager that yields a shard's gradient for the next step in host memory (1-D), to be read
        or, with ``dirty``, changed. ShardError on entry if there is none.
        """
        return borrowed_gradient(self._sets[0], shard, dirty=dirty)

    def clear_gradients(self) -> None:
        """Discard the gradients for the next step; those that a running step uses stay."""
        self._sets[0].clear()

    # The step

    def step(self, *, grad_scale: float = 1.0, absent: Collection[str] = ()) -> None:
        """Write the weights of the previous step to the lent shards, and start this one with the gradients collected so
        far, which are taken over: no shard has a gradient afterwards.

        Waits for the previous step and for gradients on their way from the device. ``grad_scale`` multiplies gradients
        as they are read. Fragments named in ``absent`` are not updated. Raises the error of the previous step; the
        error of this one is raised by the method that waits for it.
        """
        self.finish()
        self._options = copy_options(self._groups())
        given = self._sets[0]
        given.flush()
        gradients = {name: given.borrow(name)[0] for name in self._plans if given.has(name)}
        for shard in sorted(self._changed & gradients.keys()):
            self._copied = self._copies.copy(self._mirror.borrow(shard), self._borrow_weights(shard, fresh=False))
            self._weights.give_back(shard, dirty=False)
            self._inner.weights_changed(shard)
        self._copies.join(self._copied)
        self._changed -= gradients.keys()
        self._updated_shards = set(gradients)
        self._sets.reverse()
        self._sets[0].clear()
        self._running = self._thread.submit(
            self._step_in_thread, self._copied, grad_scale, frozenset(absent), gradients
        )

    def _step_in_thread(
        self,
        copied: torch.Event | None,
        grad_scale: float,
        absent: Collection[str],
        gradients: Mapping[str, torch.Tensor],
    ) -> None:
        """Wait for the copies of weights that end with the event ``copied`` (None: for nothing), then step with
        ``gradients`` (1-D, by shard) times ``grad_scale``, leaving out the fragments named in ``absent``; runs in the
        update's own thread.
        """
        if copied is not None and not copied.query():
            copied.synchronize()
        self._inner.step(grad_scale=grad_scale, absent=absent, gradients=gradients)

    def finish(self) -> bool:
        """Wait for the running step and write its weights to the shards that forward reads, except shards given to
        `weights_changed` since; return True, or False if no step was running. Raises the step's error; no weights are
        written then.

        On an accelerator work that is queued from now on sees the new weights; the host does not wait for their copies.
        """
        if self._running is None:
            return False
        running, self._running = self._running, None
        running.result()
        for shard in sorted(self._updated_shards - self._changed):
            self._copied = self._copies.copy(self._borrow_weights(shard, fresh=True), self._mirror.borrow(shard))
            self._weights.give_back(shard, dirty=True)
        self._copies.join(self._copied)
        return True

    def expect(self, grad_scale: float) -> None:
        """Do nothing: no update begins before its step (compare `ExactUpdate.expect`)."""

    def await_update(self, shard: str) -> None:
        """Do nothing: forward reads the weights of the step before (compare `ExactUpdate.await_update`)."""

    def is_updating(self, shard: str) -> bool:
        """Return False: forward never waits for the running step."""
        return False

    def half_written(self) -> str | None:
        """Wait for the running step. If it failed in the middle, so that some states have taken the step and others
        not, return words for messages about that, else None. The step's error stays for `finish`.
        """
        if self._running is not None:
            wait([self._running])
        return self._inner.half_written()

    def _borrow_weights(self, shard: str, *, fresh: bool) -> torch.Tensor:
        """Borrow a shard that forward reads and return it (1-D); ``fresh``: its content may be arbitrary, as it will be
        written. ShardError if it has another size or dtype than planned.
        """
        plan = self._plans[shard]
        return check_shard_tensor(self._weights.borrow(shard, fresh=fresh), plan, plan.dtype, "weights")

    def weights_changed(self, shard: str) -> None:
        """Record that a shard's weights were changed from outside: the next step with a gradient of the shard starts
        from them, and the running step does not overwrite them. ShardError for an unknown shard.
        """
        known_shard(self._plans, shard)
        self._changed.add(shard)
        self._changed_unreported.add(shard)

    # States

    def kinds(self, fragment: str) -> tuple[str, ...]:
        """Return the kinds of state of a fragment: ``master``, unless the weights are updated in place, its moments,
        and ``<moment>_scale`` of each 8-bit moment. ShardError for an unknown fragment.
        """
        return self._inner.kinds(fragment)

    def held(self, fragment: str) -> tuple[int, dict[str, torch.dtype]]:
        """Wait for the running step; return the steps taken by a fragment, and the dtype of each kind of state that the
        tier holds of it. ShardError for an unknown fragment.
        """
        return self._after_step().held(fragment)

    def numbers(self, fragment: str) -> dict[str, torch.Tensor]:
        """Wait for the running step; return {}, as `OffloadedUpdate.numbers` does for optimizers with a kernel, which
        alone can be delayed. ShardError for an unknown fragment.
        """
        return self._after_step().numbers(fragment)

    def states(
        self, fragments: Collection[str] | None = None, *, stale_masters: bool = False, decoded: bool = False
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Wait for the running step; return an iterator of (fragment's name, state) for each fragment (of those named,
        or all) that has any state. A state has copies in host memory: tensors (1-D) by kind, and ``step``.
        ``stale_masters``: include masters that are out of date because weights were changed; ``decoded``: 8-bit moments
        as float32.
        """
        return self._after_step().states(fragments, stale_masters=stale_masters, decoded=decoded)

    def write(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Wait for the running step; replace states of the fragments named. ``states``: for each fragment's name its
        tensors by kind (1-D), and ``step``; kinds that are not given stay. ValueError names a state that does not fit;
        nothing was changed then.
        """
        self._after_step().write(states)

    def check_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ValueError or ShardError for ``states`` that `write` would refuse; change nothing, and do not wait for
        a step.
        """
        self._inner.check_states(states)

    def restart(self, fragments: Collection[str]) -> None:
        """Wait for the running step; reset the moments and the step count of the fragments named. Their
        masters stay.
        """
        self._after_step().restart(fragments)

    def reset(self) -> None:
        """Discard all states and step counts, also after a failed step; the next step starts from the weights that
        forward reads. Waits for a running step and drops its weights and its error.
        """
        if self._running is not None:
            self._running.exception()
            self._running = None
        self._changed = set(self._plans)
        self._inner.reset()

    def seal(self, *, durable: bool = True) -> Sealed | None:
        """`finish`, then make the files permanent, so that a checkpoint can link to them, and return them; None if no
        state is in files. ``durable`` false leaves syncing to `Sealed.make_durable`. BudgetError when the disk has no
        room for new files.
        """
        self.finish()
        return self._after_step().seal(durable=durable)

    def _after_step(self) -> OffloadedUpdate:
        """Wait for the running step, raising its error; return the inner update, after telling it which weights were
        changed from outside.

        The step's own weights are left for `finish` to write: one rank alone may read states, but weights must change
        on all ranks at the same point.
        """
        if self._running is not None:
            self._running.result()
        for shard in self._changed_unreported:
            self._inner.weights_changed(shard)
        self._changed_unreported.clear()
        return self._inner

    # Accounts

    @property
    def plan(self) -> Mapping[str, int]:
        """Return the bytes held from construction on: ``states``, ``ring`` (buffers in front of files), ``gradients``
        (both sets) and ``staging`` (the copy of the weights) in host memory, ``nvme`` in files, ``device`` on the
        device.
        """
        return self._with_own_bytes(self._inner.plan)

    def memory(self) -> dict[str, int]:
        """Return the bytes held now: ``states``, ``ring`` (buffers in front of files), ``gradients`` (both sets) and
        ``staging`` (the copy of the weights) in host memory, ``nvme`` in files, ``device`` on the device.
        """
        return self._with_own_bytes(self._inner.memory())

    def _with_own_bytes(self, inner: Mapping[str, int]) -> dict[str, int]:
        """Return ``inner``, the bytes of the inner update by what holds them, with both sets of gradients and the copy
        of the weights added.
        """
        gradients = sum(own.memory()["gradients"] for own in self._sets)
        return {**inner, "gradients": gradients, "staging": inner["staging"] + self._mirror.nbytes}

    def bytes_written(self) -> int:
        """Return the bytes written to drives so far."""
        return self._inner.bytes_written()

    def bytes_written_per_day(self) -> float:
        """Return `bytes_written` at the average rate since this was made, in bytes per day."""
        return self._inner.bytes_written_per_day()

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder of masters and moments, the bytes written and read so far, its speed and its state;
        empty without files.
        """
        return self._inner.path_use()

    def report(self, name: str) -> list[str]:
        """Return lines of text, each beginning with ``name``, on what was written to drives; an empty list if nothing
        was.
        """
        return wear_report(name, self)

    def flush(self) -> None:
        """`finish`, then block until all states are on their tiers; raise the first write that failed."""
        self.finish()
        self._inner.flush()

    def close(self) -> None:
        """Wait for the running step, drop its weights, free the memory and remove the files. May be called twice."""
        self._running = None
        self._copies.synchronize()
        self._finalizer()


def _stop_and_close(thread: ThreadPoolExecutor, inner: OffloadedUpdate) -> None:
    """Wait for the step that runs in the thread, end the thread, and close the inner update."""
    thread.shutdown(wait=True)
    inner.close()
