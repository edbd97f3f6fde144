"""Gradient accumulation: which micro-batch ends a step, and which backward passes reduce gradients. Virtual ranks are
those of ``deterministic.across_world_sizes``: they fix how many micro-batches all ranks together have in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import UsageError
from .state import TrainingState


class Accumulation:
    """Counts the micro-batches of a step, whose last one is its boundary, and tells the partition which backward passes
    reduce (it is the partition's `zero_partition.TrainingLoop`). ``on_restart``: called when an accumulation is
    discarded. The attribute ``scaled`` is true if the user has called `Engine.scale` since the last step."""

    def __init__(self, state: TrainingState, on_restart: Callable[[], None]) -> None:
        self.scaled = False
        self._state = state
        self._on_restart = on_restart
        self._boundary: bool | None = None
        self._synchronises = True
        state.partition.runtime.loop.follow(self)

    @property
    def overridden(self) -> bool:
        """Return whether `set_boundary` has decided what a boundary is, instead of the micro-batch's number."""
        return self._boundary is not None

    def is_boundary(self) -> bool:
        """Return whether the current micro-batch ends an accumulation: as `set_boundary` says, else by its number."""
        if self._boundary is not None:
            return self._boundary
        return self._state.counters.accumulated + 1 >= self._state.sizes.steps

    def set_boundary(self, is_boundary: bool) -> None:
        """Let the current and all later micro-batches each end an accumulation or, if ``is_boundary`` is false,
        none."""
        self._boundary = is_boundary

    def virtual_rank(self) -> int:
        """Return this micro-batch's index among those of all ranks in the step: j * N + r for the j-th of rank r of
        N."""
        return self._state.counters.accumulated * self._state.sizes.ranks + self._state.sample_rank

    def count_micro_batch(self) -> bool:
        """Count a micro-batch of this rank, and the samples of all ranks; return whether it ended the accumulation.
        Raises `UsageError` if its boundary is not where the number of virtual ranks puts it."""
        state, boundary = self._state, self.is_boundary()
        counters = state.counters
        state.micro_batches.check_step(counters.accumulated, boundary=boundary)
        counters.accumulated = 0 if boundary else counters.accumulated + 1
        counters.micro_steps += 1
        state.groups.control.watched.micro_batches = counters.micro_steps
        counters.global_samples += state.sizes.micro * state.sizes.ranks
        if not boundary:
            self.scaled = False
        return boundary

    def restart(self) -> None:
        """Discard the micro-batches of the accumulation: the next one is the first again. Calls ``on_restart``;
        gradients are left to the caller."""
        self._state.counters.accumulated, self.scaled = 0, False
        self._on_restart()

    def position(self) -> tuple[int, int, int]:
        """Return the optimizer steps, micro-batches and samples counted since the start of training."""
        counters = self._state.counters
        return counters.global_steps, counters.micro_steps, counters.global_samples

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Discard the accumulation as `restart` does, and set the counters of micro-batches and all ranks' samples."""
        self.restart()
        counters = self._state.counters
        counters.micro_steps, counters.global_samples = micro_steps, samples
        self._state.groups.control.watched.micro_batches = micro_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in the block without reducing them. Raises `UsageError` if every micro-batch reduces."""
        options = self._state.partition.options
        if options.reduces_each:
            raise UsageError(
                "engine.no_sync() needs full gradients on every rank, but stage "
                f"{options.stage} reduces every micro-batch; use gradient_accumulation_steps instead"
            )
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def reduces_now(self) -> bool:
        """Return whether a backward pass that begins now reduces its gradients. It does at every micro-batch if the
        options say so, else at boundaries outside `no_sync`; never without an optimizer."""
        if self._state.optimizer is None:
            return False
        return self._state.partition.options.reduces_each or (self._synchronises and self.is_boundary())

    def refuse_plain_backward(self) -> str | None:
        """Return a message if ``loss.backward()``, without the engine, is refused (virtual ranks, unscaled loss)."""
        if self._state.loss_scale() != 1.0 and not self.scaled:
            return (
                "loss.backward() does not scale the loss, but fp16 needs it: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self._state.micro_batches.refuse_plain_backward()

    def refuse_written_gradients(self) -> str | None:
        """Return a message if gradients that the user writes are refused (virtual ranks, unscaled loss); else None."""
        if self._state.config.virtual_ranks:
            return (
                "with deterministic.across_world_sizes gradients come from backward alone, each virtual rank's by "
                "itself. Change the loss, or clip with engine.clip_grad_norm_"
            )
        if self._state.loss_scale() != 1.0 and not self.scaled:
            return (
                f"gradients carry fp16's loss scale, now {self._state.loss_scale():g}. Multiply the loss by it, "
                "engine.scale(loss), before you derive what you write, or clip with engine.clip_grad_norm_"
            )
        return None
