"""The engine: one model, its parts, and the calls of a training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_comm import Ledger
from zero_partition import (
    NonFiniteGradientError,
    Partition,
    ShardedOptimizer,
    StepResult,
    full_gradient,
    full_parameter,
    full_state,
    gathered,
    set_full_gradient,
    set_full_parameter,
    set_full_state,
)
from zero_precision import DynamicLossScale, LossScaleError, cast_floating, parse_dtype

from . import checkpoint
from .config import Config
from .errors import UsageError
from .observing import Observer, Unobserved
from .report import startup_report
from .schedules import Scheduler

logger = logging.getLogger("zero_core")


class Engine(nn.Module):
    """Trains ``module`` with its states cut over the ranks; made by `zero_core.initialize`.

    Call order of a micro-batch: ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``. `step` acts
    at the boundary of gradient accumulation and only counts otherwise. ``loss.backward()`` works too; then the loss
    is neither scaled nor divided.

    Attributes:
        module: the user's model.
        optimizer: the torch optimizer, its param groups live; None for inference.
        lr_scheduler: stepped after each optimizer step that was taken; may be assigned.
        config: the user's configuration as given (a dict).
        device: where the model computes.
        global_steps, micro_steps, skipped_steps, global_samples: counters since the start of training.
        ledger: bytes sent, by phase and unit.
        observer: told of losses and steps.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        sharded: ShardedOptimizer | None,
        scheduler: Scheduler | None,
        config: Config,
        ledger: Ledger,
    ) -> None:
        super().__init__()
        self.module = module
        self.lr_scheduler = scheduler
        self.ledger = ledger
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._config = config
        self._partition = partition
        self._sharded = sharded
        self._boundary: bool | None = None
        self._synchronises = True
        self._last: StepResult | None = None
        self._destroyed = False
        self.observer: Observer = Unobserved()
        partition.runtime.reduces_now = self._reduces_now
        partition.runtime.allows_plain_backward = self._refuse_plain_backward
        if partition.rank == 0:
            logger.info("%s", startup_report(config, partition))

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output unchanged. A failure is told to all ranks."""
        self._check_open("forward")
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = cast_floating((args, kwargs), torch.float16)
        with self._told_to_all(), self._autocast():
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate ``loss`` (a scalar), divided by the accumulation steps unless ``scale_wrt_gas`` is false;
        return the divided loss.

        Gradients are reduced on the way: at the accumulation boundary at stages 0 and 1, each time at stages 2 and 3.
        """
        self._check_trainable("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(f"engine.backward: expected a scalar loss that requires gradients, got {_describe(loss)}")
        scaled = loss / self._config.gradient_accumulation_steps if scale_wrt_gas else loss
        with self._told_to_all():
            self.observer.loss(loss)
            self._partition.runtime.begin_backward()
            whole = scaled * self.loss_scale() if self.loss_scale() != 1.0 else scaled
            torch.autograd.backward(whole, retain_graph=retain_graph)
            self._partition.runtime.end_backward()
        return scaled.detach()

    def step(self) -> None:
        """At the accumulation boundary: agree, clip, update, publish, step the scheduler. Otherwise only count the
        micro-batch.

        Raises `NonFiniteGradientError` on every rank when a gradient is not finite and no loss scale is in use; the
        weights are unchanged.
        """
        sharded = self._check_trainable("step")
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self.global_samples += self.train_micro_batch_size_per_gpu() * self._partition.world_size
        if not boundary:
            return
        with self._told_to_all():
            self.observer.before_step()
            self._last = sharded.step()
        if self._last.taken:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
            if self._partition.rank == 0:
                logger.warning("step %d skipped: a gradient is not finite", self.global_steps)
        self.global_steps += 1
        self._partition.runtime.step = self.global_steps
        self._print_progress()
        self.observer.after_step(self._last)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends an accumulation."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide yourself whether the current micro-batch ends an accumulation; holds until set again."""
        self._boundary = is_boundary

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected so far (`step` does it by itself)."""
        self._partition.runtime.hide_gradients()
        self._partition.runtime.reducer.clear()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the averaged gradients to the global norm ``max_norm`` now; return the norm before. Collective."""
        sharded = self._check_trainable("clip_grad_norm_")
        with self._told_to_all():
            norm = sharded.gradient_norm()
            sharded.scale_gradients(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None before the first step."""
        return None if self._last is None else self._last.norm

    def was_step_applied(self) -> bool:
        """Whether the last `step` at a boundary updated the weights."""
        return self._last is not None and self._last.taken

    def loss_scale(self) -> float:
        """The factor that the loss is multiplied with before backward."""
        return 1.0 if self._sharded is None else self._sharded.loss_scale.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts itself."""
        return self._sharded is not None and isinstance(self._sharded.loss_scale, DynamicLossScale)

    # -- whole values ------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, parameters: Any, modifier_rank: int | None = None) -> Iterator[None]:
        """Have ``parameters`` whole inside the block (see `zero_partition.gathered`). Collective."""
        with gathered(self._partition, parameters, modifier_rank):
            yield

    def full_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the whole parameter in the optimizer's precision. Collective."""
        self._check_open("full_param")
        return full_parameter(self._partition, parameter)

    def full_grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A copy of the whole averaged gradient, or None when no rank has one. Collective."""
        self._check_open("full_grad")
        return full_gradient(self._partition, parameter)

    def full_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A copy of the whole optimizer state ``key`` of a parameter. Collective."""
        return full_state(self._partition, self._check_trainable("full_state"), parameter, key)

    def set_full_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace a parameter, its master included, by rank 0's ``value``. Collective."""
        self._check_open("set_full_param")
        set_full_parameter(self._partition, parameter, value)

    def set_full_grad(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the averaged gradient of a parameter by rank 0's ``value`` until the next step. Collective."""
        self._check_open("set_full_grad")
        set_full_gradient(self._partition, parameter, value)

    def set_full_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace the optimizer state ``key`` of a parameter by rank 0's ``value``. Collective."""
        set_full_state(self._partition, self._check_trainable("set_full_state"), parameter, key, value)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything needed to go on into ``save_dir/tag`` (default ``global_step{N}``), atomically. Collective.

        ``client_state`` is plain data and comes back from `load_checkpoint`. Raises `zero_ckpt.CheckpointError` on
        every rank.
        """
        self._check_open("save_checkpoint")
        if not str(save_dir):
            raise UsageError("save_checkpoint(save_dir): expected a directory, got an empty string")
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        checkpoint.save(self, Path(save_dir), name, dict(client_state or {}), save_latest, exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Load ``load_dir/tag`` (default: the newest whole one), written at any world size and stage; return ``(path,
        client_state)``.

        Collective. Raises `zero_ckpt.CheckpointError` on every rank: there is never a silent fresh start.
        """
        self._check_open("load_checkpoint")
        wanted = checkpoint.Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only and self._sharded is not None,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )
        return checkpoint.load(self, Path(load_dir), tag, wanted)

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer whose groups hold this rank's fragments."""
        return None if self._sharded is None else self._sharded.inner

    @property
    def sharded_optimizer(self) -> ShardedOptimizer | None:
        """The transaction around the optimizer."""
        return self._sharded

    @property
    def partition(self) -> Partition:
        """Which rank owns what."""
        return self._partition

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the user gave it."""
        return self._config.raw

    @property
    def resolved_config(self) -> Config:
        """The configuration with every value resolved."""
        return self._config

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._partition.device

    def config_report(self) -> str:
        """Every configuration value with its origin, as a table."""
        rows = [(r.path, repr(r.value), r.provenance, r.note) for r in self._config.report()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
        )

    def memory_report(self) -> dict[str, int]:
        """Bytes of model state that this rank holds now, by kind."""
        states = 0
        if self._sharded is not None:
            values = (v for o in self._sharded.fragments for v in self._sharded.state.get(o.tensor, {}).values())
            states = sum(v.untyped_storage().nbytes() for v in values if isinstance(v, torch.Tensor))
        return {**self._partition.memory(), "optimizer states": states}

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [group["lr"] for group in self._check_trainable("get_lr").param_groups]

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._config.gradient_accumulation_steps

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._partition.options.stage

    def destroy(self, whole: bool = True) -> None:
        """Bring the parameters back in one piece, remove all hooks and leave the process groups. Collective.

        ``whole``: false leaves sharded parameters released, for models that do not fit on one rank.
        """
        if self._destroyed:
            return
        self._destroyed = True
        self._partition.close(whole=whole)
        self._partition.groups.close()

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
        if self.loss_scale() != 1.0:
            return "loss.backward() does not scale the loss, but fp16 needs it: call engine.backward(loss)"
        return None

    def _check_open(self, call: str) -> None:
        if self._destroyed:
            raise UsageError(f"engine.{call}: this engine was destroyed; the plain model goes on, or initialize again")

    def _check_trainable(self, call: str) -> ShardedOptimizer:
        self._check_open(call)
        if self._sharded is None:
            raise UsageError(
                f"engine.{call}: this engine has no optimizer; pass optimizer=… to initialize or add an 'optimizer' "
                "section to the config"
            )
        return self._sharded

    def _autocast(self) -> Any:
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=parse_dtype(section.dtype or "bf16"))

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """A failure of this rank ends the engine on all ranks, each naming it; refusals that all ranks raise together
        do not."""
        try:
            yield
        except (NonFiniteGradientError, LossScaleError):
            raise
        except BaseException as failure:
            self._partition.runtime.abort(failure)
            raise

    def _print_progress(self) -> None:
        every = self._config.steps_per_print
        if every is None or self._partition.rank or not self._last or self.global_steps % every:
            return
        rates = ", ".join(f"{rate:.3g}" for rate in self.get_lr())
        logger.info(
            "step %d: gradient norm %.4g, lr %s, skipped %d",
            self.global_steps,
            self._last.norm,
            rates,
            self.skipped_steps,
        )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
    return type(value).__name__
