"""The order of events in a micro-batch and an optimizer step, and the calls of the parts that follow them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, Protocol

import torch

from zero_optim import Scheduler
from zero_partition import StepResult, naming_dtypes
from zero_partition.micro_batches import LossOf, agreed_micro_batches, call_model
from zero_precision import cast_floating
from zero_settings import input_dtype

from .accumulation import Accumulation
from .audit import Auditor
from .checkpoint import Checkpoints
from .checkpointing import Checkpointing
from .errors import UsageError
from .failures import Failures
from .instruments import Instruments
from .offloading import Offloading
from .schedules import stepping_with
from .state import TrainingState


class Observer(Protocol):
    """Receives the losses and steps of one engine, on every rank. Its methods may communicate."""

    def loss(self, loss: torch.Tensor) -> None:
        """Receive the ``loss`` of a micro-batch, before its backward pass."""

    def before_step(self) -> None:
        """Called at an accumulation boundary, before the optimizer step: all gradients are averaged."""

    def after_step(self, result: StepResult) -> None:
        """Receive the ``result`` of an optimizer step, once the weights are published."""


class Unobserved:
    """An `Observer` that does nothing."""

    def loss(self, loss: torch.Tensor) -> None: ...
    def before_step(self) -> None: ...
    def after_step(self, result: StepResult) -> None: ...


logger = logging.getLogger("zero_core")


class Training:
    """The passes and steps of one engine. Call order of a micro-batch: `forward`, `backward`, `step`. Instruments,
    auditor, observer, tiers and checkpoints are called from here and nowhere else.

    Attributes:
        observer: called with each loss and step result; may be assigned."""

    def __init__(
        self,
        state: TrainingState,
        accumulation: Accumulation,
        failures: Failures,
        instruments: Instruments,
        audit: Auditor,
        offloading: Offloading,
        checkpointing: Checkpointing,
        checkpoints: Checkpoints,
    ) -> None:
        self.observer: Observer = Unobserved()
        self._state = state
        self._accumulation = accumulation
        self._failures = failures
        self._instruments = instruments
        self._audit = audit
        self._offloading = offloading
        self._checkpointing = checkpointing
        self._checkpoints = checkpoints

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output; floating arguments are cast first as `fp16` or `bf16` ``auto_cast``
        says. Collective at stage 3. If it fails while other ranks may wait for this one, all ranks raise."""
        state = self._state
        state.check_open("forward")
        micro_batch = state.micro_batches.around_forward(state.counters.global_steps, state.counters.accumulated)
        with self._failures.may_be_caught("forward"), self._instruments.during("forward"):
            with self._offloading.forward(), micro_batch, self._audit.forward():
                return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its arguments cast, under the configured autocast; return its output."""
        state = self._state
        if (dtype := input_dtype(state.config)) is not None:
            args, kwargs = cast_floating((args, kwargs), dtype)
        with state.autocast(), self._checkpointing.running(), naming_dtypes(state.module, (args, kwargs)):
            return state.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, divide: bool) -> torch.Tensor:
        """Backpropagate the scalar ``loss``, divided by the accumulation steps if ``divide``. Return the loss, divided
        likewise, detached, in float32 at least, without the loss scale. Collective if it reduces. Raises `UsageError`
        for another ``loss``."""
        state = self._state
        state.check_trainable("backward")
        precise = _float32_at_least("backward", loss)
        steps, scale = state.sizes.steps, state.loss_scale()
        state.micro_batches.check_backward(state.counters.global_steps, state.counters.accumulated)
        scaled = state.micro_batches.to_backpropagate(precise, steps, divide=divide)
        with self._failures.may_be_caught("backward"):
            self.observer.loss(loss)
            with self._instruments.during("backward"), self._audit.backward(loss):
                state.partition.runtime.begin_backward()
                with self._instruments.during("backward_inner"):
                    torch.autograd.backward(scaled * scale if scale != 1.0 else scaled, retain_graph=retain_graph)
                with self._instruments.during("backward_allreduce"):
                    state.partition.runtime.end_backward()
        returned = (precise / steps if divide else precise).detach()
        self._instruments.loss(returned)
        return returned

    def train_batch(self, batches: Iterable[Any], loss_of: LossOf) -> torch.Tensor:
        """Take one optimizer step over the next micro-batches of ``batches``, unit by unit where units are released;
        return the mean loss. ``loss_of``: returns the loss, from a model's output and its micro-batch. Collective."""
        state, steps = self._state, self._state.sizes.steps
        state.check_trainable("train_batch")
        begun = None if self._accumulation.overridden else state.counters.accumulated
        with self._failures.abort_all_on_failure():
            given = agreed_micro_batches(batches, steps, begun, state.partition.runtime.agree, UsageError)
        losses: list[torch.Tensor] = []

        def run(batch: Any, backpropagate: Callable[[torch.Tensor], None]) -> None:
            """Run forward of one micro-batch, add its loss to ``losses``, and call ``backpropagate`` with the scaled
            loss."""
            loss = loss_of(call_model(self._call, batch), batch)
            precise = _float32_at_least("train_batch", loss) / steps
            losses.append(precise.detach())
            self.observer.loss(loss)
            self._instruments.loss(losses[-1])
            backpropagate(precise * state.loss_scale())

        by_unit = any(unit.releasable for unit in state.partition.units) and not state.config.virtual_ranks
        if by_unit:
            stores = (self._offloading.forward, self._checkpointing.storing_inputs)
            during = self._instruments.during("backward")
            with self._failures.may_be_caught("train_batch", awaited=True), during, self._audit.backward(None):
                state.partition.runtime.run_unit_by_unit([partial(run, batch) for batch in given], stores)
        with self._failures.may_be_caught("step", awaited=True):  # which drops the gradients so far
            for number, batch in enumerate(given, start=1):
                if not by_unit:
                    loss = loss_of(call_model(self.forward, batch), batch)
                    losses.append(self.backward(loss, retain_graph=False, divide=True))
                if number < steps:
                    self.step(stepping_with(None))
        self.step(stepping_with(None))
        return reduce(torch.add, losses)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scalar ``loss`` times the loss scale, and allow plain ``backward()`` until the next `step`."""
        self._state.check_trainable("scale")
        scaled = _float32_at_least("scale", loss) * self._state.loss_scale()
        self._accumulation.scaled = True
        return scaled

    def step(self, schedule: Callable[[Scheduler], object]) -> None:
        """Count the micro-batch and, at the boundary, take an optimizer step on all ranks. ``schedule``: called with
        the scheduler, if any, after an update of the weights; what it raises is raised once the step is complete."""
        state, counters = self._state, self._state.counters
        optimizer = state.check_trainable("step")
        state.partition.runtime.refuse_torn("step")
        self._checkpoints.check_folder()
        if not self._accumulation.count_micro_batch():
            return
        with self._failures.step():
            self.observer.before_step()
            self._audit.before_step()
            self._checkpoints.before_step()
            with self._instruments.during("step"):
                result = counters.last = optimizer.step()
            self._checkpoints.step_taken()
        self._accumulation.scaled = False
        raised = result.raised
        if not result.skipped:
            counters.last_taken = result
            if state.attached.scheduler is not None and raised is None:
                raised = _raised_by(schedule, state.attached.scheduler)
        else:
            counters.skipped_steps += 1
            if state.reports:
                logger.warning("step %d skipped: a gradient is not finite", counters.global_steps)
        counters.global_steps += 1
        state.partition.runtime.step = counters.global_steps
        with self._failures.abort_all_on_failure():
            self._instruments.after_step()
            self._offloading.after_step(counters.global_steps)
            self._audit.after_step()
        self._checkpointing.after_step(reports=state.reports)
        self.observer.after_step(result)
        self._checkpoints.after_step()
        if raised is not None:  # the step is taken, as all ranks know it
            raise raised

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the averaged gradients to the global norm ``max_norm``; return their norm before. Collective."""
        optimizer = self._state.check_trainable("clip_grad_norm_")
        self._state.micro_batches.check_between_steps("clip_grad_norm_", self._state.counters.accumulated)
        with self._failures.abort_all_on_failure():
            norm = optimizer.gradient_norm()
            optimizer.scale_gradients(min(1.0, max_norm / (norm + 1e-6)))
        return norm


def _raised_by(schedule: Callable[[Scheduler], object], scheduler: Scheduler) -> Exception | None:
    """Call ``schedule`` with ``scheduler``; return the exception that it raised, or None."""
    try:
        schedule(scheduler)
    except Exception as error:
        return error
    return None


def _float32_at_least(call: str, loss: torch.Tensor) -> torch.Tensor:
    """Return ``loss`` in float32 or wider, as 2**16 times a loss is infinite in float16. Raises `UsageError`, naming
    ``call``, unless it is a scalar tensor that requires gradients."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(f"engine.{call}: expected a scalar loss that requires gradients, got {_describe(loss)}")
    return loss.float() if loss.dtype.itemsize < 4 else loss


def _describe(value: object) -> str:
    """Return text on the type or shape of ``value``, which a call of the engine got instead of a loss."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
    return type(value).__name__
