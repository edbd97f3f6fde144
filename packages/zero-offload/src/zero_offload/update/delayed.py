"""An update that runs beside the next forward and backward, one step late."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._copy_streams import compute_device
from .._memory import HostBlock
from ..budget import HostBudget
from ..ends import HostUse
from ..sealed import Sealed
from ..trace import Trace
from ._gradients import HostGradients, borrowed_gradient, gradient_bytes
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

    Arguments and methods are those of `OffloadedUpdate` with gradients in host memory. It holds two sets of gradients
    and a copy of all weights in host memory. `step` waits for the previous step, writes its weights, and returns while
    its own runs; `finish`, and every method that reads or writes states, waits for that one too. The method that waits
    for a failed step raises its error.
    """

    def __init__(
        self,
        shards: Sequence[ShardPlan],
        optimizer: str | type[torch.optim.Optimizer],
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        weights: Weights,
        tier_options: TierOptions | None = None,
        *,
        device: torch.device | str | None = None,
        budget: HostBudget | None = None,
        trace: Trace | None = None,
    ) -> None:
        device = compute_device(device)
        (tier_options or TierOptions()).check_device(device)
        budget = HostBudget() if budget is None else budget
        budget.need("two sets of gradients", 2 * gradient_bytes(shards))
        budget.need("weights that wait for their step", _Mirror.bytes_of(shards))
        pin = (tier_options or TierOptions()).pin and device.type != "cpu"
        self._groups = groups
        self._options: Sequence[Mapping[str, Any]] = _copy_options(groups())
        self._weights = weights
        self._plans = {shard.name: shard for shard in shards}
        self._mirror = _Mirror()
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
        self._running: Future[None] | None = None
        self._updated_shards: set[str] = set()
        self._changed_unreported: set[str] = set()
        self._finalizer = weakref.finalize(self, _stop_and_close, self._thread, self._inner)

    @property
    def writes(self) -> int:
        """See `OffloadedUpdate`."""
        return self._inner.writes

    # Gradients

    def borrow_gradient(self, shard: str) -> tuple[torch.Tensor, bool]:
        """See `OffloadedUpdate.borrow_gradient`."""
        return self._sets[0].borrow(shard)

    def give_back_gradient(self, shard: str) -> None:
        """See `OffloadedUpdate.give_back_gradient`."""
        self._sets[0].give_back(shard, dirty=True)

    def add_gradient(self, shard: str, gradient: torch.Tensor) -> None:
        """See `OffloadedUpdate.add_gradient`."""
        self._sets[0].add(shard, gradient)

    def has_gradient(self, shard: str) -> bool:
        """See `OffloadedUpdate.has_gradient`."""
        return self._sets[0].has(shard)

    def gradient(self, shard: str, *, dirty: bool = False) -> AbstractContextManager[torch.Tensor]:
        """See `OffloadedUpdate.gradient`."""
        return borrowed_gradient(self._sets[0], shard, dirty=dirty)

    def clear_gradients(self) -> None:
        """See `OffloadedUpdate.clear_gradients`."""
        self._sets[0].clear()

    # The step

    def step(self, *, grad_scale: float = 1.0, absent: Collection[str] = ()) -> None:
        """Write the weights of the previous step, and start this one with the gradients collected so far."""
        self.finish()
        self._options = _copy_options(self._groups())
        given = self._sets[0]
        given.flush()
        gradients = {name: given.borrow(name)[0] for name in self._plans if given.has(name)}
        for shard in sorted(self._changed & gradients.keys()):
            self._mirror.borrow(shard).copy_(self._borrow_weights(shard, fresh=False))
            self._weights.give_back(shard, dirty=False)
            self._inner.weights_changed(shard)
        self._changed -= gradients.keys()
        self._updated_shards = set(gradients)
        self._sets.reverse()
        self._sets[0].clear()
        self._running = self._thread.submit(
            self._inner.step, grad_scale=grad_scale, absent=frozenset(absent), gradients=gradients
        )

    def finish(self) -> bool:
        """Wait for the running step and write its weights to the shards that forward reads; return False if none was
        running.
        """
        if self._running is None:
            return False
        running, self._running = self._running, None
        running.result()
        for shard in sorted(self._updated_shards - self._changed):
            self._borrow_weights(shard, fresh=True).copy_(self._mirror.borrow(shard))
            self._weights.give_back(shard, dirty=True)
        return True

    def _borrow_weights(self, shard: str, *, fresh: bool) -> torch.Tensor:
        """Borrow a shard that forward reads, and check its size and dtype."""
        plan = self._plans[shard]
        return check_shard_tensor(self._weights.borrow(shard, fresh=fresh), plan, plan.dtype, "weights")

    def weights_changed(self, shard: str) -> None:
        """Record that a shard's weights were changed from outside: the next step starts from them, and the running step
        does not overwrite them.
        """
        self._changed.add(shard)
        self._changed_unreported.add(shard)

    # States

    def kinds(self, fragment: str) -> tuple[str, ...]:
        """See `OffloadedUpdate.kinds`."""
        return self._inner.kinds(fragment)

    def held(self, fragment: str) -> tuple[int, dict[str, torch.dtype]]:
        """See `OffloadedUpdate.held`."""
        return self._after_step().held(fragment)

    def states(
        self, fragments: Collection[str] | None = None, *, stale_masters: bool = False, decoded: bool = False
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """See `OffloadedUpdate.states`."""
        return self._after_step().states(fragments, stale_masters=stale_masters, decoded=decoded)

    def write(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """See `OffloadedUpdate.write`."""
        self._after_step().write(states)

    def restart(self, fragments: Collection[str]) -> None:
        """See `OffloadedUpdate.restart`."""
        self._after_step().restart(fragments)

    def reset(self) -> None:
        """See `OffloadedUpdate.reset`; waits for a running step and drops its weights and its error."""
        if self._running is not None:
            self._running.exception()
            self._running = None
        self._changed = set(self._plans)
        self._inner.reset()

    def seal(self, *, durable: bool = True) -> Sealed | None:
        """See `OffloadedUpdate.seal`."""
        self.finish()
        return self._after_step().seal(durable=durable)

    def _after_step(self) -> OffloadedUpdate:
        """Wait for the running step; return the inner update, informed of weights that were changed from outside.

        The step's own weights stay for `finish`: one rank alone may read states, but weights must change on all ranks
        at the same point.
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
        """See `OffloadedUpdate.plan`; the copy of the weights counts as ``staging``."""
        return self._with_own_bytes(self._inner.plan)

    def memory(self) -> dict[str, int]:
        """See `OffloadedUpdate.memory`."""
        return self._with_own_bytes(self._inner.memory())

    def _with_own_bytes(self, inner: Mapping[str, int]) -> dict[str, int]:
        """Return the inner update's bytes with this object's gradients and copy of the weights added."""
        gradients = sum(own.memory()["gradients"] for own in self._sets)
        return {**inner, "gradients": gradients, "staging": inner["staging"] + self._mirror.nbytes}

    def bytes_written(self) -> int:
        """See `OffloadedUpdate.bytes_written`."""
        return self._inner.bytes_written()

    def bytes_written_per_day(self) -> float:
        """See `OffloadedUpdate.bytes_written_per_day`."""
        return self._inner.bytes_written_per_day()

    def flush(self) -> None:
        """`finish`, then see `OffloadedUpdate.flush`."""
        self.finish()
        self._inner.flush()

    def close(self) -> None:
        """Wait for the running step, drop its weights, free the memory and remove the files. May be called twice."""
        self._running = None
        self._finalizer()


class _Mirror:
    """A copy in host memory of the weights after the last step; the inner update writes it."""

    def __init__(self) -> None:
        self._views: dict[str, torch.Tensor] = {}
        self.nbytes = 0

    @staticmethod
    def bytes_of(shards: Sequence[ShardPlan]) -> int:
        """Return the bytes of the shards' weights."""
        return sum(shard.numel * shard.dtype.itemsize for shard in shards)

    def allocate(self, shards: Sequence[ShardPlan], *, pin: bool) -> None:
        self.nbytes = self.bytes_of(shards)
        parts = tuple((shard.name, self.bytes_of([shard])) for shard in shards)
        block = HostBlock(self.nbytes, HostUse("weights of the delayed update", pin=pin, parts=parts))
        position = 0
        for shard in sorted(shards, key=lambda shard: -shard.dtype.itemsize):
            self._views[shard.name] = block.view(position, shard.numel, shard.dtype)
            position += shard.numel * shard.dtype.itemsize

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        return self._views[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """Do nothing: the copy stays."""


def _copy_options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the groups' current options, since schedulers change them while the step runs."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()} for group in options]


def _stop_and_close(thread: ThreadPoolExecutor, inner: OffloadedUpdate) -> None:
    thread.shutdown(wait=True)
    inner.close()
