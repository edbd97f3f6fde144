"""The engine: one model, its parts, and the calls of a training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ckpt import CheckpointError
from zero_comm import Ledger, PeerError
from zero_partition import EditRefusedError, NonFiniteGradientError, Partition, ShardedOptimizer, StepResult
from zero_precision import LossScaleError, cast_floating, parse_dtype

from .audit import Auditor, auditor_for
from .checkpoint import InMemory, Notices, Saver, periodic_of
from .checkpointing import Checkpointing
from .config import Config
from .departure import Departure
from .errors import UsageError
from .instruments import instruments_for, say
from .loading import RankLoader
from .model_parallel import ModelPart
from .monitors import build_monitor
from .observing import Observer, Unobserved
from .offloading import Offloading
from .parking import ParkedStates
from .preparation import Preparation
from .report import startup_report
from .schedules import Scheduler
from .virtual_ranks import MicroBatches, micro_batches

logger = logging.getLogger("zero_core")


class Engine(Preparation):
    """Trains ``module`` with its states cut over the ranks; made by `zero_core.initialize`.

    Call order of a micro-batch: ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``. `step` acts
    at the boundary of gradient accumulation and only counts otherwise. ``loss.backward()`` works too; then the loss
    is not divided, and under fp16 it has to be scaled: ``engine.scale(loss).backward()``.

    Attributes:
        module: the user's model.
        optimizer: the torch optimizer, its param groups live; None for inference.
        lr_scheduler: stepped after each optimizer step that was taken; may be assigned.
        config: the user's configuration as given (a dict).
        device: where the model computes.
        global_steps, micro_steps, skipped_steps, global_samples: counters since the start of training.
        ledger: bytes sent, by phase and unit.
        training_dataloader: the loader of `initialize`'s ``training_data``; may be assigned (see `data_loader`). Its
            position is part of a checkpoint.
        monitor: where numbers are written; ``monitor.write_events([("name", value, samples)])`` adds your own.
        instruments: what is timed, counted and printed.
        checkpointing: where `zero_core.checkpointing.checkpoint` keeps activations inside this engine's forward.
        observer: told of losses and steps.
        micro_batches: what a step is made of.
        audit: compares what ranks hold, every ``audit_every`` steps.
        load_report: what the last `load_checkpoint` did to each name (a `zero_ckpt.LoadReport`); None before.
        model_part: what this rank's model is of the whole one, under an mpu.
        reports: whether this rank, the first of the job, prints and logs for all.
        offloading: what is not on the device; `offloading.table()` is the overlap report.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        sharded: ShardedOptimizer | None,
        scheduler: Scheduler | None,
        config: Config,
        ledger: Ledger,
        model_part: ModelPart,
        collate_fn: Callable[[list[Any]], Any] | None,
        offloading: Offloading,
    ) -> None:
        super().__init__()
        self.module = module
        self.lr_scheduler = scheduler
        self.ledger = ledger
        self.model_part = model_part
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._config = config
        self._partition = partition
        self._sharded = sharded
        self._boundary: bool | None = None
        self._synchronises = True
        self._last: StepResult | None = None
        self._destroyed = False
        self._parked: ParkedStates | None = None
        self._batch = (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )
        self._accumulated = 0
        self._scaled = False
        self.micro_batches: MicroBatches = micro_batches(config, partition, module)
        self._collate_fn = collate_fn
        self.training_dataloader: RankLoader[Any] | None = None
        self.observer: Observer = Unobserved()
        self._saver = Saver.of(config)
        self._in_memory = InMemory.of(config)
        self._departure = Departure.of()
        self._periodic = periodic_of(config, is_whole=model_part.place.size == 1)
        self._notices = Notices(partition.groups.control, self._saver, self._in_memory, self._periodic)
        self.offloading = offloading
        self.checkpointing = Checkpointing(config.activation_checkpointing, model_part.place.group)
        self._compiled: list[str] = []
        partition.readers.add(self._saver.copied)
        partition.readers.add(self._in_memory.copied)
        partition.used_by(self)
        partition.runtime.reduces_now = self._reduces_now
        partition.runtime.allows_plain_backward = self._refuse_plain_backward
        partition.runtime.user_gradients.refuses = self._refuse_written_gradients
        self.reports = dist.get_rank() == 0
        if self.reports:
            logger.info("%s", startup_report(config, partition))
        with self.told_to_all():
            self.monitor = build_monitor(config, dist.get_rank())
        self.instruments = instruments_for(self, self.monitor)
        self.audit: Auditor = auditor_for(self, config.audit_every)
        if config.dump_state and self.reports:
            say("\n".join([startup_report(config, partition), self.config_report(), self.memory_table()]))

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output unchanged. A failure is told to all ranks."""
        self._check_open("forward")
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = cast_floating((args, kwargs), torch.float16)
        micro_batch = self.micro_batches.forward(self.global_steps, self._accumulated)
        with self._may_fail("forward"), self.autocast(), self.checkpointing.running():
            with self.instruments.during("forward"), self.offloading.forward(), micro_batch, self.audit.forward():
                return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate ``loss`` (a scalar), divided by the accumulation steps unless ``scale_wrt_gas`` is false;
        return the divided loss.

        Gradients are reduced on the way: at the accumulation boundary at stages 0 and 1, each time at stages 2 and 3.
        """
        self._check_trainable("backward")
        precise = _precise("backward", loss)
        steps = self.gradient_accumulation_steps()
        self.micro_batches.before_backward(self.global_steps, self._accumulated)
        scaled = self.micro_batches.to_backpropagate(precise, steps, divide=scale_wrt_gas)
        with self._may_fail("backward"):
            self.observer.loss(loss)
            with self.instruments.during("backward"), self.audit.backward():
                self._partition.runtime.begin_backward()
                with self.instruments.during("backward_inner"):
                    whole = scaled * self.loss_scale() if self.loss_scale() != 1.0 else scaled
                    torch.autograd.backward(whole, retain_graph=retain_graph)
                with self.instruments.during("backward_allreduce"):
                    self._partition.runtime.end_backward()
        returned = (precise / steps if scale_wrt_gas else precise).detach()
        self.instruments.loss(returned)
        return returned

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` (a scalar) times the loss scale, for a backward pass of your own: ``engine.scale(loss).backward()``.

        It is not divided by the accumulation steps. Holds for the backward passes before the next `step`.
        """
        self._check_trainable("scale")
        scaled = _precise("scale", loss) * self.loss_scale()
        self._scaled = True
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary: agree, clip, update, publish, step the scheduler (with ``lr_kwargs``), and save
        where ``checkpoint.interval`` says so. Otherwise only count the micro-batch.

        Raises `NonFiniteGradientError` on every rank when a gradient is not finite and no loss scale is in use; the
        weights are unchanged.
        """
        self._advance(lambda scheduler: scheduler.step(**(lr_kwargs or {})))

    def _advance(self, schedule: Callable[[Scheduler], object]) -> None:
        """`step`; ``schedule`` is called with the scheduler, if there is one, when the weights were updated."""
        sharded = self._check_trainable("step")
        self._partition.runtime.refuse_torn("step")
        self._periodic.check(self._departure.root)
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_batches.before_step(self._accumulated, boundary=boundary)
        self._accumulated = 0 if boundary else self._accumulated + 1
        self.micro_steps += 1
        self._partition.groups.control.watched.micro_batches = self.micro_steps
        self.global_samples += self.train_micro_batch_size_per_gpu() * self._partition.data_world_size
        if not boundary:
            self._scaled = False
            return
        with self._may_fail("step") if self._is_alone() else self.told_to_all():
            self.observer.before_step()
            self.audit.before_step()
            self._departure.before_step(self)
            self._notices.before_step(leads=self.reports)
            with self.instruments.during("step"):
                self._last = sharded.step()
            self._notices.after_step()
        self._scaled = False
        if self._last.taken:
            if self.lr_scheduler is not None:
                schedule(self.lr_scheduler)
        else:
            self.skipped_steps += 1
            if self.reports:
                logger.warning("step %d skipped: a gradient is not finite", self.global_steps)
        self.global_steps += 1
        self._partition.runtime.step = self.global_steps
        with self.told_to_all():
            self.instruments.after_step()
            self.offloading.after_step(self.global_steps)
            self.audit.after_step()
        self.checkpointing.after_step(reports=self.reports)
        self.observer.after_step(self._last)
        self._notices.check()
        if self._in_memory.after_step(self):
            self._departure.after_checkpoint(self, self._in_memory.wait)
        self._periodic.after_step(self, self._saver, self._departure.root, due=self._notices.due)
        self._departure.after_step(self, self.save_checkpoint)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends an accumulation."""
        if self._boundary is not None:
            return self._boundary
        return self._accumulated + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide yourself whether the current micro-batch ends an accumulation; holds until set again."""
        self._boundary = is_boundary

    def virtual_rank(self) -> int:
        """The number of the present micro-batch among those of the step on all ranks: micro-batch j of rank r of N is
        j N + r. Under ``deterministic.across_world_sizes`` what it computes depends on nothing else of the three."""
        return self._accumulated * self._partition.data_world_size + self._partition.data_rank

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add up gradients on this rank (stages 0 and 1)."""
        if self._partition.options.reduces_each:
            raise UsageError(
                "engine.no_sync() needs whole gradients on every rank, but stage "
                f"{self.zero_optimization_stage()} reduces every micro-batch; use gradient_accumulation_steps instead"
            )
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Ranks may call the engine a different number of times inside, without backward: generation, evaluation.

        Who is done waits at the end and takes part in gathering parameters for the others. Collective.
        """
        self._check_open("synced")
        with self.told_to_all(), self._partition.runtime.synced():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected so far (`step` does it by itself), or have zeros instead of them, as the
        module's and the optimizer's own ``zero_grad`` do. On every rank at the same point."""
        self.module.zero_grad(set_to_none)

    @property
    def accumulated(self) -> int:
        """Micro-batches of the running accumulation that `step` has counted."""
        return self._accumulated

    def begin_accumulation(self) -> None:
        """Forget the gradients collected so far and begin a new accumulation with the next micro-batch."""
        self.zero_grad()
        self._accumulated = 0

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the averaged gradients to the global norm ``max_norm`` now; return the norm before. Collective."""
        sharded = self._check_trainable("clip_grad_norm_")
        self.micro_batches.before("clip_grad_norm_", self._accumulated)
        with self.told_to_all():
            norm = sharded.gradient_norm()
            sharded.scale_gradients(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None before the first step."""
        return None if self._last is None else self._last.norm

    def was_step_applied(self) -> bool:
        """Whether the last `step` at a boundary updated the weights."""
        return self._last is not None and self._last.taken

    def destroy(self, whole: bool = True) -> None:
        """Bring the parameters back in one piece, remove all hooks and leave the process groups. Collective.

        ``whole``: false leaves sharded parameters released, for models that do not fit on one rank. Waits for
        checkpoints that are written behind training, and raises `zero_ckpt.CheckpointError` when one failed.
        """
        if self._destroyed:
            return
        self._destroyed = True
        try:
            self._saver.close()
            self._in_memory.close()
        finally:
            self._partition.close(whole=whole)
            self.offloading.close()
            self._partition.groups.close()
            self.model_part.close()
            self.monitor.close()
            self.instruments.close()

    def autocast(self) -> Any:
        """The autocast context of the forward pass, as `torch_autocast` says."""
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=parse_dtype(section.dtype or "bf16"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _reduces_now(self) -> bool:
        if self._sharded is None:
            return False
        if self._partition.options.reduces_each:
            return True
        return self._synchronises and self.is_gradient_accumulation_boundary()

    def _refuse_plain_backward(self) -> str | None:
        if self.loss_scale() != 1.0 and not self._scaled:
            return (
                "loss.backward() does not scale the loss, but fp16 needs it: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self.micro_batches.no_plain_backward()

    def _refuse_written_gradients(self) -> str | None:
        if self._config.virtual_ranks:
            return (
                "with deterministic.across_world_sizes gradients come from backward alone, each virtual rank's by "
                "itself. Change the loss, or clip with engine.clip_grad_norm_"
            )
        if self.loss_scale() != 1.0 and not self._scaled:
            return (
                f"gradients carry fp16's loss scale, now {self.loss_scale():g}. Multiply the loss by it, "
                "engine.scale(loss), before you derive what you write, or clip with engine.clip_grad_norm_"
            )
        return None

    def _is_alone(self) -> bool:
        """Whether no other rank takes part, and no tier that a failure could leave half written."""
        parts = self._partition
        return parts.data_world_size == 1 and self.model_part.place.size == 1 and parts.states is None

    @contextmanager
    def _may_fail(self, call: str) -> Iterator[None]:
        """A failure that the user may catch: the engine goes on where no other rank can be waiting for this one."""
        try:
            yield
        except BaseException as failure:
            runtime = self._partition.runtime
            alone = self.model_part.place.size == 1  # else a part's own collectives may be waited for
            if not alone or not runtime.failed_in(call, failure):
                runtime.abort(failure)
                self.model_part.abort(failure)
            elif runtime.reducer.torn is not None:
                self._accumulated, self._scaled = 0, False
            raise

    @contextmanager
    def told_to_all(self) -> Iterator[None]:
        """A failure of this rank ends the engine on all ranks, each naming it; refusals that all ranks raise together
        do not, nor does what fails where there is no other rank."""
        try:
            yield
        except (NonFiniteGradientError, LossScaleError, UsageError, EditRefusedError):
            raise
        except CheckpointError as failure:  # raised on every rank, also where one could not be reached any more
            error = PeerError(str(failure))
            cause = self._partition.groups.control.explain(error)
            if cause is error:
                raise
            self._partition.runtime.abort(cause)
            raise cause from failure
        except BaseException as failure:
            if self._is_alone():
                raise
            self._partition.runtime.abort(failure)
            self.model_part.abort(failure)
            raise


def _precise(call: str, loss: torch.Tensor) -> torch.Tensor:
    """The loss in fp32 at least: a scale of 2**16 is infinite in fp16."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(f"engine.{call}: expected a scalar loss that requires gradients, got {_describe(loss)}")
    return loss.float() if loss.dtype.itemsize < 4 else loss


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
    return type(value).__name__
