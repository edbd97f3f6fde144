"""The boundaries of an accumulation of micro-batches, and the backward passes it allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import UsageError
from .state import TrainingState


class Accumulation:
    """Counts the micro-batches of a step, and answers the partition's questions about backward passes.

    ``on_restart``: called when a step begins anew.

    Attributes:
        scaled: whether the user has scaled a loss, for backward passes of their own before the next step.
    """

    def __init__(self, state: TrainingState, on_restart: Callable[[], None]) -> None:
        self.scaled = False
        self._state = state
        self._on_restart = on_restart
        self._boundary: bool | None = None
        self._synchronises = True
        state.partition.runtime.loop.follow(self)

    def is_boundary(self) -> bool:
        """Return whether the current micro-batch ends an accumulation."""
        if self._boundary is not None:
            return self._boundary
        return self._state.counters.accumulated + 1 >= self._state.sizes.steps

    def set_boundary(self, is_boundary: bool) -> None:
        """Decide whether the current micro-batch ends an accumulation; holds until set again."""
        self._boundary = is_boundary

    def virtual_rank(self) -> int:
        """Return the number of the present micro-batch among those of the step on all ranks."""
        parts = self._state.partition
        return self._state.counters.accumulated * parts.data_world_size + parts.data_rank

    def count(self) -> bool:
        """Count a micro-batch; return whether it ended the accumulation. Raises `UsageError`."""
        state, boundary = self._state, self.is_boundary()
        counters = state.counters
        state.micro_batches.before_step(counters.accumulated, boundary=boundary)
        counters.accumulated = 0 if boundary else counters.accumulated + 1
        counters.micro_steps += 1
        state.groups.control.watched.micro_batches = counters.micro_steps
        counters.global_samples += state.sizes.micro * state.partition.data_world_size
        if not boundary:
            self.scaled = False
        return boundary

    def restart(self) -> None:
        """Begin a new accumulation with the next micro-batch; gradients are the caller's affair."""
        self._state.counters.accumulated, self.scaled = 0, False
        self._on_restart()

    def position(self) -> tuple[int, int, int]:
        """Return the optimizer steps, micro-batches and samples that were counted."""
        counters = self._state.counters
        return counters.global_steps, counters.micro_steps, counters.global_samples

    def go_back(self, micro_steps: int, samples: int) -> None:
        """Begin the step anew, after so many micro-batches and samples."""
        self.restart()
        counters = self._state.counters
        counters.micro_steps, counters.global_samples = micro_steps, samples
        self._state.groups.control.watched.micro_batches = micro_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes inside only add up gradients on this rank. Raises `UsageError` above stage 1."""
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
        """Return whether a backward pass that begins now reduces its gradients."""
        if self._state.optimizer is None:
            return False
        if self._state.partition.options.reduces_each:
            return True
        return self._synchronises and self.is_boundary()

    def refuse_plain_backward(self) -> str | None:
        """Return why ``loss.backward()`` cannot be counted; None when it can."""
        if self._state.loss_scale() != 1.0 and not self.scaled:
            return (
                "loss.backward() does not scale the loss, but fp16 needs it: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self._state.micro_batches.no_plain_backward()

    def refuse_written_gradients(self) -> str | None:
        """Return why the user's own gradients cannot be taken; None when they can."""
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
