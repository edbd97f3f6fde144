"""The update of a rank's shards, with masters, moments and gradients on a tier."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch

from .._copy_streams import compute_device
from .._protocols import Generation, PathUse
from .._wear import wear_report
from ..budget import HostBudget
from ..errors import OffloadError, ShardError
from ..sealed import Sealed
from ..trace import Trace
from ._build import build, check_room_for_seal
from ._fragments import check_same_moments, make_fragments
from ._gradients import CallerGradients, CollectedGradients, borrowed_gradient, known_shard
from ._probed_states import number_tensor
from ._rules import OptimizerLike, find_rule, has_rule
from ._slices import KeptFragment
from ._states import as_values, check_state, forget_states, read_states, sealed_state, write_states
from ._step import run_step
from .plans import ShardPlan, Weights, check_plans
from .tier_options import TierOptions

__all__ = ["OffloadedUpdate"]


class OffloadedUpdate:
    """Adam, AdamW, SGD, Adagrad, Lion or any elementwise optimizer over shards of flat weights; the caller owns the
    weights.

    ``optimizer``: a name or a class (see `supports`), or an optimizer, which must be elementwise: where there is no
    kernel for it, copies of it step on the host, one fragment or a part of it at a time. ``groups`` returns the
    parameter groups and is called at every step, so that changes by schedulers and by loading take effect; keys that
    are not options of the optimizer are ignored. ``weights`` lends the shards. ``tier_options`` says where masters and
    moments are kept. ``gradients``: collected during backward in ``"host"`` memory or in files (``"nvme"``), or kept by
    the ``"caller"``. ``device``: that of weights and gradients, by default the current accelerator, else the CPU.
    ``budget`` collects the needs and checks them before anything is allocated (BudgetError). ``trace`` records the
    transfers.

    A step, in order: `borrow_gradient` and `give_back_gradient` (or `add_gradient`) for each shard, any number of
    times; `gradient` to inspect them; `step`, or not; `clear_gradients`. Nothing is written to the tier before the
    first step: masters start from the weights unless `write` set them, moments from their initial values.

    A step that fails in the middle (ShardError and its subclasses name tensor, file and offset) leaves some weights
    updated and others not; further steps are refused until `reset`. Not thread-safe.

    Attributes:
        writes: the number of calls of `write`, `restart` and `reset`.
    """

    def __init__(
        self,
        shards: Sequence[ShardPlan],
        optimizer: OptimizerLike,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        weights: Weights,
        tier_options: TierOptions | None = None,
        *,
        gradients: Literal["host", "nvme", "caller"] = "host",
        device: torch.device | str | None = None,
        budget: HostBudget | None = None,
        trace: Trace | None = None,
    ) -> None:
        if gradients not in ("host", "nvme", "caller"):
            raise ValueError(f"gradients: expected 'host', 'nvme' or 'caller', got {gradients!r}")
        check_plans(shards, len(groups()))
        tier_options, place = tier_options or TierOptions(), compute_device(device)
        tier_options.check_device(place, optimizer, beside=False)
        self._rule = find_rule(optimizer)
        self._groups = groups
        self._trace = trace
        self._started = time.monotonic()
        self._closed = False
        self._failed = False
        self.writes = 0
        self._by_shard = {
            shard.name: make_fragments(shard, self._rule, groups(), tier_options.state_dtype) for shard in shards
        }
        self._fragments = {f.name: f for fragments in self._by_shard.values() for f in fragments}
        self._first_of_group = {f.plan.group: f for f in reversed(self._fragments.values())}
        self._parts = build(
            shards,
            self._rule,
            list(self._fragments.values()),
            weights,
            tier_options,
            gradients,
            place,
            HostBudget() if budget is None else budget,
            trace,
        )
        self._generations: list[Generation] = []
        self._finalizer = weakref.finalize(self, self._parts.close)

    @staticmethod
    def supports(optimizer: OptimizerLike) -> bool:
        """Return whether there is a kernel for an optimizer: a name ("AdamW", any case), a class (a subclass counts as
        another class), or an object that sets no option that the kernel lacks.
        """
        return has_rule(optimizer)

    # Gradients

    def borrow_gradient(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return host memory (1-D) to reduce a shard's gradient into, and whether it holds the sum of earlier
        gradients; if not, its content is arbitrary.

        Give it back by `give_back_gradient` before the next call for the same shard. ShardError if the shard is not
        updated here; OffloadError if the caller keeps the gradients, or after `close`.
        """
        return self._collected_gradients().borrow(shard)

    def give_back_gradient(self, shard: str) -> None:
        """Take over the gradient in the memory that `borrow_gradient` returned, which the caller must not use any more:
        the shard has a gradient from now on. ShardError if the shard is not updated here; OffloadError if the caller
        keeps the gradients, or after `close`.
        """
        self._collected_gradients().give_back(shard, dirty=True)

    def add_gradient(self, shard: str, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Add a shard's gradient (1-D, on any device) to the sum of earlier ones. Return the sum on that device, in 1-D
        parts that follow each other, valid for work that is queued before the next gradient of the shard.

        The tensor may be freed at once, but must not be written to before `flush` or the step. ShardError if the shard
        is not updated here; OffloadError if the caller keeps the gradients, or after `close`.
        """
        return self._collected_gradients().add(shard, gradient)

    def join_gradients(self) -> None:
        """Make the accelerator's current stream wait for the gradients that are on their way to host memory, so that
        work queued from now on follows them; the host does not wait. OffloadError if the caller keeps them.
        """
        self._collected_gradients().join()

    def has_gradient(self, shard: str) -> bool:
        """Return whether a shard has a gradient for the next step; False between steps if the caller keeps the
        gradients.
        """
        return self._parts.gradients.has(shard)

    def gradient(self, shard: str, *, dirty: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Return a context manager that yields a shard's gradient in host memory (1-D), to be read or, with ``dirty``,
        changed. ShardError on entry if there is none; OffloadError if the caller keeps the gradients.
        """
        return borrowed_gradient(self._collected_gradients(), shard, dirty=dirty)

    def clear_gradients(self) -> None:
        """Discard all gradients. Collected ones are kept, also by `step`, until this is called."""
        self._parts.gradients.clear()

    def _collected_gradients(self) -> CollectedGradients:
        """Return the object that collects the gradients; OffloadError if the caller keeps them, or after `close`."""
        self._check_open()
        if isinstance(self._parts.gradients, CallerGradients):
            raise OffloadError("the caller keeps the gradients; give them to step(gradients=…)")
        return cast(CollectedGradients, self._parts.gradients)

    # The step

    @torch.no_grad()
    def step(
        self,
        *,
        grad_scale: float = 1.0,
        absent: Collection[str] = (),
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Update every fragment whose shard has a gradient, except those named in ``absent``; write the new weights to
        the lent shards. Other fragments, and their states, stay as they are.

        ``grad_scale`` multiplies gradients as they are read: the clip factor over the loss scale. ``gradients`` (1-D,
        by shard) are given if and only if the caller keeps them. ValueError for options of a group that cannot be
        updated with; nothing was changed then. OffloadError after a step that failed, and after `close`.
        """
        self._check_step()
        caller = isinstance(self._parts.gradients, CallerGradients)
        if (gradients is not None) != caller:
            raise ValueError("step(gradients=…): expected them if and only if the caller keeps them")
        for number, group in enumerate(self._groups()):
            self._check_group(number, group)
        if isinstance(self._parts.gradients, CallerGradients) and gradients is not None:
            self._parts.gradients.give(gradients)
        self._failed = True
        self._update_fragments(grad_scale, absent)
        self._failed = False
        if caller:
            self._parts.gradients.clear()

    def _update_fragments(self, grad_scale: float, absent: Collection[str]) -> None:
        """Update the fragments of all shards that have a gradient, except those named in ``absent``, as `step` does,
        without its checks.
        """
        fragments = {
            fragment
            for shard, own in self._by_shard.items()
            if self._parts.gradients.has(shard)
            for fragment in own
            if fragment.name not in absent
        }
        parts = self._parts
        run_step(
            self._rule,
            self._groups(),
            parts.slices,
            parts.tier,
            parts.staged,
            parts.on_device,
            parts.on_host,
            fragments,
            absent=absent,
            grad_scale=grad_scale,
            trace=self._trace,
        )

    def _check_step(self) -> None:
        """Raise OffloadError after a step that failed, and after `close`."""
        self._check_open()
        if self._failed:
            raise OffloadError("an earlier step failed in the middle; load a saved state first")

    def finish(self) -> bool:
        """Return False: a step has ended when `step` returns, so there is nothing to wait for (compare
        `DelayedUpdate.finish`).
        """
        return False

    def expect(self, grad_scale: float) -> None:
        """Do nothing: no update begins before its step (compare `ExactUpdate.expect`)."""

    def await_update(self, shard: str) -> None:
        """Do nothing: a step has ended when `step` returns (compare `ExactUpdate.await_update`, which waits for a
        shard).
        """

    def is_updating(self, shard: str) -> bool:
        """Return False: a step has ended when `step` returns (compare `ExactUpdate.is_updating`)."""
        return False

    def half_written(self) -> str | None:
        """Return words for messages about a step that failed in the middle, so that some weights and states have taken
        it and others not; None if there is no such step.
        """
        return "a step" if self._failed else None

    def weights_changed(self, shard: str) -> None:
        """Record that a shard's weights were changed from outside: the next step replaces each master that does not
        round to its weight. ShardError for an unknown shard.
        """
        for fragment in known_shard(self._by_shard, shard):
            fragment.weights_changed = True

    def _check_group(self, number: int, group: Mapping[str, Any]) -> None:
        """Raise ValueError if the options of parameter group ``number`` cannot be updated with, or would change which
        moments its fragments have.
        """
        self._rule.check_group(group)
        if number in self._first_of_group:
            check_same_moments(self._first_of_group[number], self._rule, group)

    # States

    def kinds(self, fragment: str) -> tuple[str, ...]:
        """Return the kinds of state of a fragment: ``master``, unless the weights are updated in place, its moments,
        and ``<moment>_scale`` of each 8-bit moment. ShardError for an unknown fragment.
        """
        return tuple(kind.name for kind in self._fragment_named(fragment).kinds)

    def held(self, fragment: str) -> tuple[int, dict[str, torch.dtype]]:
        """Return the steps taken by a fragment, and the dtype of each kind that `states` would yield for it now.
        ShardError for an unknown fragment.
        """
        known = self._fragment_named(fragment)
        return known.step, {kind.name: kind.dtype for kind in known.kinds if known.keeps(kind)}

    def numbers(self, fragment: str) -> dict[str, torch.Tensor]:
        """Return what torch's optimizer keeps of a fragment beside moments and ``step``, by name, as 0-D tensors;
        before the first step these are examples of the right type. Empty for optimizers with a kernel. ShardError for
        an unknown fragment.
        """
        known = self._fragment_named(fragment)
        examples = self._rule.numbers(self._groups()[known.plan.group])
        return {name: number_tensor(value) for name, value in examples.items()} | known.numbers

    def states(
        self, fragments: Collection[str] | None = None, *, stale_masters: bool = False, decoded: bool = False
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (fragment, state) for each fragment (of those named, or all) that has any state, in one pass over the
        tier.

        The master of a shard whose weights were changed (`weights_changed`) is left out until a step or `write` has
        replaced it, unless ``stale_masters``: where such a master rounds to the weight it is still the more precise
        value. ``step`` has no dimension; the other kinds are 1-D copies in host memory, in the dtypes that are kept:
        8-bit moments are codes (uint8) and, as ``<moment>_scale``, a float32 for every 256 elements; with ``decoded``
        they are float32 values without scales. When the first is requested: OffloadError after a step that failed,
        ShardError for an unknown fragment.
        """
        self._check_open()
        if self._failed:
            raise OffloadError("an earlier step failed in the middle; its state is not worth saving")
        chosen = self._fragments.values() if fragments is None else [self._fragment_named(name) for name in fragments]
        for fragment, state in read_states(list(chosen), self._parts.slices, self._parts.tier, stale=stale_masters):
            yield fragment.name, as_values(fragment, state) if decoded else state

    def write(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace states of the fragments named. ``states``: for each fragment's name, tensors (1-D) by kind, and
        ``step``. A master that is given counts as equal to the current weights.

        Kinds that are not given stay; if there are none yet, the next step makes the master from the weights, and
        moments start from their initial values. Any floating dtype is converted. ValueError names a state that does not
        fit, ShardError an unknown fragment; nothing was changed then. After a transfer that failed, steps are refused
        until `reset`.
        """
        self._check_open()
        found = self.check_states(states)
        self.writes += 1
        failed, self._failed = self._failed, True
        write_states(self._rule, self._groups(), self._parts.slices, self._parts.tier, found)
        self._failed = failed

    def check_states(self, states: Mapping[str, Mapping[str, Any]]) -> dict[KeptFragment, Mapping[str, Any]]:
        """Return ``states``, given as for `write`, with the fragments themselves as keys; raise the errors of `write`
        for those that do not fit. Nothing is changed.
        """
        found = {self._fragment_named(name): state for name, state in states.items()}
        for fragment, state in found.items():
            check_state(self._rule, self._groups(), fragment, state)
        return found

    def restart(self, fragments: Collection[str]) -> None:
        """Reset the moments and the step counts of the fragments named; their masters stay. ShardError for an unknown
        fragment; none is reset then.
        """
        self._check_open()
        named = [self._fragment_named(name) for name in fragments]
        self.writes += 1
        for fragment in named:
            fragment.step, fragment.has_moments, fragment.numbers, fragment.unwritten = 0, False, {}, set()

    def reset(self) -> None:
        """Discard all states and step counts, also after a failed step; the next step starts from the weights.
        Gradients stay.
        """
        self._check_open()
        self.writes += 1
        self._parts.tier.reset()
        forget_states(list(self._fragments.values()))
        self._failed = False

    def seal(self, *, durable: bool = True) -> Sealed | None:
        """Make the files permanent, so that a checkpoint can link to them; the next step writes new files. None if no
        state is in files. ``durable`` false leaves syncing to `Sealed.make_durable`.

        Raises BudgetError when the disk has no room for the new files, the first write that failed, and OffloadError
        after a step that failed. Gradients are not sealed.
        """
        self._check_open()
        if self._failed:
            raise OffloadError("an earlier step failed in the middle; its state is not worth saving")
        check_room_for_seal(self._parts)
        generation = self._parts.tier.seal(durable=durable)
        if generation is None:
            return None
        self._generations.append(generation)
        sealed = sealed_state(
            list(self._fragments.values()), self._parts.in_memory, self._parts.tier, self._generations
        )
        self._generations = sealed.needed(self._generations)
        return sealed

    def _fragment_named(self, fragment: str) -> KeptFragment:
        """Return the fragment of this name; ShardError if there is none."""
        if fragment not in self._fragments:
            raise ShardError(f"no fragment '{fragment}' is updated here", tensor=fragment)
        return self._fragments[fragment]

    # Accounts

    @property
    def plan(self) -> Mapping[str, int]:
        """Return the bytes held from construction on: ``states``, ``ring`` (buffers in front of files), ``gradients``
        and ``staging`` in host memory, ``nvme`` in files, ``device`` on the device.
        """
        return self._parts.plan

    def memory(self) -> dict[str, int]:
        """Return the bytes held now: ``states``, ``ring`` (buffers in front of files), ``gradients`` and ``staging`` in
        host memory, ``nvme`` in files, ``device`` on the device.
        """
        return self._parts.memory()

    def bytes_written(self) -> int:
        """Return the bytes written to drives so far, which is what wears them."""
        return self._parts.tier.bytes_written() + self._parts.gradients.bytes_written()

    def bytes_written_per_day(self) -> float:
        """Return `bytes_written` at the average rate since this was made, in bytes per day."""
        return self.bytes_written() * 86400.0 / max(time.monotonic() - self._started, 1e-9)

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder of masters and moments, the bytes written and read so far, its speed and its state;
        empty without files.
        """
        return self._parts.tier.path_use()

    def report(self, name: str) -> list[str]:
        """Return lines of text, each beginning with ``name``, on what was written to drives; an empty list if nothing
        was.
        """
        return wear_report(name, self)

    def flush(self) -> None:
        """Block until all gradients have been collected and all states have reached their tier; raise the first write
        that failed. OffloadError after `close`.
        """
        self._check_open()
        self._parts.gradients.flush()
        self._parts.tier.flush()

    def close(self) -> None:
        """Free the memory and remove the files; other methods must not be called then. May be called twice."""
        self._closed = True
        self._finalizer()

    def __enter__(self) -> OffloadedUpdate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        """Raise OffloadError after `close`."""
        if self._closed:
            raise OffloadError("the optimizer is closed")
