"""The engine: one model, its parts, and the calls of a training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from zero_comm import Ledger
from zero_partition import NonFiniteGradientError, Partition, ShardedOptimizer, StepResult
from zero_precision import LossScaleError, cast_floating, parse_dtype

from . import checkpoint
from .checkpointing import Checkpointing
from .compiling import compile_model
from .config import Config
from .errors import UsageError
from .instruments import instruments_for, say
from .loading import RankLoader, rank_loader
from .monitors import build_monitor
from .observing import Observer, Unobserved
from .parking import ParkedStates, kinds_of
from .report import startup_report
from .schedules import Scheduler
from .whole_values import WholeValues

logger = logging.getLogger("zero_core")


class Engine(WholeValues):
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
        training_dataloader: the loader of `initialize`'s ``training_data``; may be assigned (see `deepspeed_io`). Its
            position is part of a checkpoint.
        monitor: where numbers are written; ``monitor.write_events([("name", value, samples)])`` adds your own.
        instruments: what is timed, counted and printed.
        checkpointing: where `zero_core.checkpointing.checkpoint` keeps activations inside this engine's forward.
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
        collate_fn: Callable[[list[Any]], Any] | None = None,
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
        self._parked: ParkedStates | None = None
        self._batch = (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )
        self._accumulated = 0
        self._collate_fn = collate_fn
        self.training_dataloader: RankLoader[Any] | None = None
        self.observer: Observer = Unobserved()
        self.checkpointing = Checkpointing(config.activation_checkpointing)
        self._compiled: list[str] = []
        partition.runtime.reduces_now = self._reduces_now
        partition.runtime.allows_plain_backward = self._refuse_plain_backward
        if partition.rank == 0:
            logger.info("%s", startup_report(config, partition))
        with self._told_to_all():
            self.monitor = build_monitor(config, partition.rank)
        self.instruments = instruments_for(self, self.monitor)
        if config.dump_state and partition.rank == 0:
            say("\n".join([startup_report(config, partition), self.config_report(), self.memory_table()]))

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output unchanged. A failure is told to all ranks."""
        self._check_open("forward")
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = cast_floating((args, kwargs), torch.float16)
        with self._told_to_all(), self._autocast(), self.checkpointing.running(), self.instruments.during("forward"):
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate ``loss`` (a scalar), divided by the accumulation steps unless ``scale_wrt_gas`` is false;
        return the divided loss.

        Gradients are reduced on the way: at the accumulation boundary at stages 0 and 1, each time at stages 2 and 3.
        """
        self._check_trainable("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(f"engine.backward: expected a scalar loss that requires gradients, got {_describe(loss)}")
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        with self._told_to_all():
            self.observer.loss(loss)
            with self.instruments.during("backward"):
                self._partition.runtime.begin_backward()
                with self.instruments.during("backward_inner"):
                    whole = scaled * self.loss_scale() if self.loss_scale() != 1.0 else scaled
                    torch.autograd.backward(whole, retain_graph=retain_graph)
                with self.instruments.during("backward_allreduce"):
                    self._partition.runtime.end_backward()
        returned = scaled.detach()
        self.instruments.loss(returned)
        return returned

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary: agree, clip, update, publish, step the scheduler (with ``lr_kwargs``).
        Otherwise only count the micro-batch.

        Raises `NonFiniteGradientError` on every rank when a gradient is not finite and no loss scale is in use; the
        weights are unchanged.
        """
        sharded = self._check_trainable("step")
        boundary = self.is_gradient_accumulation_boundary()
        self._accumulated = 0 if boundary else self._accumulated + 1
        self.micro_steps += 1
        self.global_samples += self.train_micro_batch_size_per_gpu() * self._partition.world_size
        if not boundary:
            return
        with self._told_to_all():
            self.observer.before_step()
            with self.instruments.during("step"):
                self._last = sharded.step()
        if self._last.taken:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        else:
            self.skipped_steps += 1
            if self._partition.rank == 0:
                logger.warning("step %d skipped: a gradient is not finite", self.global_steps)
        self.global_steps += 1
        self._partition.runtime.step = self.global_steps
        with self._told_to_all():
            self.instruments.after_step()
        self.checkpointing.after_step(self._partition.rank)
        self.observer.after_step(self._last)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends an accumulation."""
        if self._boundary is not None:
            return self._boundary
        return self._accumulated + 1 >= self.gradient_accumulation_steps()

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

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Ranks may call the engine a different number of times inside, without backward: generation, evaluation.

        Who is done waits at the end and takes part in gathering parameters for the others. Collective.
        """
        self._check_open("synced")
        with self._told_to_all(), self._partition.runtime.synced():
            yield

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move this rank's model states to host memory until `reload_states`; the engine does nothing else meanwhile.

        ``include``: among `zero_core.parking.KINDS`, by default all. ``non_blocking`` is a hint. Raises `UsageError`.
        """
        self._check_open("offload_states")
        if str(getattr(device, "value", device)) != "cpu":
            raise UsageError(f"engine.offload_states(device=…): expected 'cpu', got {device!r}")
        self._parked = ParkedStates(self._partition, self._sharded, kinds_of(include), pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took away; nothing happens when nothing is away."""
        if self._parked is not None:
            self._parked.bring_back()
            self._parked = None

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

    # -- data --------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: Literal["train", "eval", "predict"] = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> RankLoader[Any]:
        """A loader of this rank's samples of ``dataset``, shuffled for ``route="train"`` (see `RankLoader`).

        ``batch_size``: samples per batch and rank, by default the micro-batch. ``num_local_io_workers``: processes that
        prepare batches ahead. Raises `UsageError` for data without samples by number.
        """
        if route not in ("train", "eval", "predict"):
            raise UsageError(f"engine.deepspeed_io(route=…): expected 'train', 'eval' or 'predict', got {route!r}")
        return rank_loader(
            dataset,
            batch_size if batch_size is not None else self.train_micro_batch_size_per_gpu(),
            rank=self._partition.rank,
            ranks=self._partition.world_size,
            device=self.device,
            shuffle=route == "train",
            sampler=data_sampler,
            collate_fn=collate_fn if collate_fn is not None else self._collate_fn,
            drop_last=self._config.dataloader_drop_last,
            pin_memory=pin_memory,
            workers=num_local_io_workers,
        )

    # -- compilation -------------------------------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """torch.compile the module, from its next call on: whole at stages 0 to 2, unit by unit at stage 3.

        ``compile_kwargs``: for `torch.compile`. Raises `UsageError` for DeepCompile's ``schedule``, for compiled
        autograd, and at stage 3 for modes that use CUDA graphs.
        """
        self._check_open("compile")
        self._compiled = compile_model(
            self.module, self._partition, backend, compile_kwargs, schedule, compiled_autograd_enabled
        )

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return bool(self._compiled)

    @property
    def compiled_modules(self) -> list[str]:
        """Names of the modules that are compiled, each as one graph unless its own code breaks it."""
        return list(self._compiled)

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

    def destroy(self, whole: bool = True) -> None:
        """Bring the parameters back in one piece, remove all hooks and leave the process groups. Collective.

        ``whole``: false leaves sharded parameters released, for models that do not fit on one rank.
        """
        if self._destroyed:
            return
        self._destroyed = True
        self._partition.close(whole=whole)
        self._partition.groups.close()
        self.monitor.close()

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


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
    return type(value).__name__
