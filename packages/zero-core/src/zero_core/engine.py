"""The engine: one model, its parts, and the calls of a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from zero_ckpt import LoadReport
from zero_comm import Ledger
from zero_config import Config
from zero_optim import Scheduler
from zero_partition import Partition, ShardedOptimizer

from . import report
from .audit import Auditor
from .checkpoint import CustomLoad, Resumed, Wanted
from .checkpointing import Checkpointing
from .composition import EngineParts
from .copying import refuse_copy, refuse_pickle, share
from .data_loader import RankLoader
from .delegation import Delegated
from .instruments import Instruments, communication_table, memory_rows, memory_table
from .model_parallel import ModelPart
from .monitors import Monitor
from .offloading import Offloading
from .preparation import compile_module
from .recording import report_of
from .schedules import stepping_with
from .state import TrainingState
from .training import Observer

if TYPE_CHECKING:
    from zero_report import Report


class Engine(nn.Module):
    """Trains ``module`` with its states sharded over the ranks; made by `zero_core.initialize`.

    Call order of a micro-batch: ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``. `step` acts
    at the boundary of gradient accumulation and only counts otherwise. ``loss.backward()`` works too; then the loss
    is not divided, and under fp16 it has to be scaled: ``engine.scale(loss).backward()``.

    Every other attribute is the model's: ``engine.name`` is ``engine.module.name``.

    Attributes:
        module: the user's model.
        optimizer: the torch optimizer, its param groups live; None for inference.
        sharded_optimizer: the transaction around it.
        lr_scheduler: stepped after each optimizer step that was taken; may be assigned.
        training_dataloader: the loader of `initialize`'s ``training_data``; may be assigned (see `data_loader`). Its
            position is part of a checkpoint.
        config: the user's configuration as given (a dict); ``resolved_config`` has every value.
        device: where the model computes.
        partition: which rank owns what.
        global_steps, micro_steps, skipped_steps, global_samples: counters since the start of training.
        ledger: bytes sent, by phase and unit.
        monitor: where numbers are written; ``monitor.write_events([("name", value, samples)])`` adds your own.
        instruments: what is timed, counted and printed.
        checkpointing: where `zero_core.checkpointing.checkpoint` keeps activations inside this engine's forward.
        observer: told of losses and steps; may be assigned.
        audit: compares what ranks hold, every ``audit_every`` steps.
        load_report: what the last `load_checkpoint` did to each name (a `zero_ckpt.LoadReport`); None before.
        model_part: what this rank's model is of the full one, under an mpu.
        offloading: what is not on the device; `offloading.table()` is the overlap report.
        compiled_modules: names of what `compile` has compiled, each as one graph unless its own code breaks it.
        training_state: what the parts of the engine share.
    """

    module: nn.Module
    optimizer = Delegated[Optimizer | None]("training_state", "torch_optimizer")
    sharded_optimizer = Delegated[ShardedOptimizer | None]("training_state", "optimizer")
    lr_scheduler = Delegated[Scheduler | None]("training_state.attached", "scheduler")
    training_dataloader = Delegated[RankLoader[Any] | None]("training_state.attached", "loader")
    config = Delegated[dict[str, Any]]("training_state.config", "raw")
    resolved_config = Delegated[Config]("training_state", "config")
    device = Delegated[torch.device]("training_state")
    partition = Delegated[Partition]("training_state")
    model_part = Delegated[ModelPart]("training_state")
    ledger = Delegated[Ledger]("training_state")
    global_steps = Delegated[int]("training_state.counters")
    micro_steps = Delegated[int]("training_state.counters")
    skipped_steps = Delegated[int]("training_state.counters")
    global_samples = Delegated[int]("training_state.counters")
    compiled_modules = Delegated[list[str]]("training_state", "compiled")
    monitor = Delegated[Monitor]("_parts")
    instruments = Delegated[Instruments]("_parts")
    checkpointing = Delegated[Checkpointing]("_parts")
    audit = Delegated[Auditor]("_parts")
    offloading = Delegated[Offloading]("_parts")
    observer = Delegated[Observer]("_parts.training")
    load_report = Delegated[LoadReport | None]("_parts.checkpoints", "report")
    __copy__, __deepcopy__, __reduce_ex__ = share, refuse_copy, refuse_pickle

    def __init__(self, state: TrainingState, parts: EngineParts) -> None:
        super().__init__()
        self.module = state.module
        self.training_state = state
        self._parts = parts
        state.partition.set_user(self)

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output unchanged. A failure is told to all ranks."""
        return self._parts.training.forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate ``loss`` (a scalar), divided by the accumulation steps unless ``scale_wrt_gas`` is false, and
        return the divided loss.

        Gradients are reduced on the way: at the accumulation boundary at stages 0 and 1, each time at stages 2 and 3.
        """
        return self._parts.training.backward(loss, retain_graph=retain_graph, divide=scale_wrt_gas)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` (a scalar) times the loss scale, for a backward pass of your own: ``engine.scale(loss).backward()``.
        It is not divided by the accumulation steps. Holds for the backward passes before the next `step`."""
        return self._parts.training.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary: agree, clip, update, publish, step the scheduler (with ``lr_kwargs``), and save
        where ``checkpoint.interval`` says so. Otherwise only count the micro-batch. Raises `NonFiniteGradientError` on
        every rank, weights unchanged, when a gradient is not finite and no loss scale is in use."""
        self._parts.training.step(stepping_with(lr_kwargs))

    def step_without_schedule(self) -> None:
        """As `step`; the learning rate is left to the caller."""
        self._parts.training.step(lambda _scheduler: None)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch ends an accumulation."""
        return self._parts.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide yourself whether the current micro-batch ends an accumulation; holds until set again."""
        self._parts.accumulation.set_boundary(is_boundary)

    def virtual_rank(self) -> int:
        """The number of the present micro-batch among those of the step on all ranks: j N + r for micro-batch j of rank
        r of N. Under ``deterministic.across_world_sizes`` what it computes depends on nothing else of the three."""
        return self._parts.accumulation.virtual_rank()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add up gradients on this rank (stages 0 and 1)."""
        return self._parts.accumulation.no_sync()

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Ranks may call the engine a different number of times inside, without backward: generation, evaluation. Who
        is done waits at the end and takes part in gathering parameters for the others. Collective."""
        self.training_state.check_open("synced")
        with self._parts.failures.told_to_all(), self.partition.runtime.synced():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected so far (`step` does it by itself), or have zeros instead, as the module's and
        the optimizer's own ``zero_grad`` do. On every rank at the same point."""
        self.module.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the averaged gradients to the global norm ``max_norm`` now; return the norm before. Collective."""
        return self._parts.training.clip_gradients(max_norm)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """torch.compile the module, from its next call on: as one graph at stages 0 to 2, unit by unit at stage 3.

        ``compile_kwargs``: for `torch.compile`. Raises `UsageError` for DeepCompile's ``schedule``, for compiled
        autograd, and at stage 3 for modes that use CUDA graphs.
        """
        compile_module(self.training_state, backend, compile_kwargs, schedule, compiled_autograd_enabled)

    @property
    def is_compiled(self) -> bool:
        """Return whether `compile` was called."""
        return bool(self.compiled_modules)

    def data_loader(
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
        workers = num_local_io_workers
        return self._parts.loaders.make(dataset, batch_size, route, pin_memory, data_sampler, collate_fn, workers)

    def destroy(self, unshard: bool = True) -> None:
        """Unshard the parameters, remove all hooks and leave the process groups. Collective.

        ``unshard``: false leaves sharded parameters released, for models that do not fit on one rank. Waits for saves
        behind training, and raises `zero_ckpt.CheckpointError` when one failed.
        """
        if not self.training_state.lifetime.destroyed:
            self.training_state.lifetime.destroyed = True
            self._parts.close(self.training_state, unshard)

    # -- checkpoints, and states that wait elsewhere -----------------------------------------------------------------

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
        every rank. With ``checkpoint.writer.decoupled`` it returns once the state is copied into host memory; a failed
        save then raises from a later `step`, `save_checkpoint`, `load_checkpoint` or `destroy`.
        """
        self._parts.checkpoints.save(
            save_dir, tag, client_state or {}, save_latest=save_latest, exclude_frozen=exclude_frozen_parameters
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: CustomLoad | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load ``load_dir/tag`` (default: the newest complete one), of any world size and stage; return (path, client).

        ``custom_load_fn(src=tensors by name, dst=module)`` loads the weights instead of names that fit: it runs on
        every rank with the module unsharded, and what it leaves there on rank 0 counts. What was loaded, converted,
        defaulted and ignored is in `load_report`.

        Collective. Raises `zero_ckpt.CheckpointError` on every rank: there is never a silent fresh start.
        """
        wanted = Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only and self.sharded_optimizer is not None,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            custom=custom_load_fn,
        )
        return self._parts.checkpoints.load(load_dir, tag, wanted)

    def resume(self, load_dir: str | os.PathLike[str]) -> Resumed | None:
        """Load the newest state of this job, at any world size, and say where training goes on; None for a first start.

        It is the newest copy in the nodes' memory (``checkpoint.in_memory``), where one is complete and not older than
        the newest checkpoint in ``load_dir``, else that checkpoint. A damaged copy is passed over with a warning.
        Collective. Raises `zero_ckpt.CheckpointError` on every rank when there are checkpoints and none can be loaded.
        """
        return self._parts.checkpoints.resume(load_dir)

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move this rank's model states to ``device`` ("cpu" or "nvme") until `reload_states`; the engine does nothing
        else meanwhile. Collective.

        ``include``: among `zero_core.parking.KINDS`, by default all. "nvme": the configuration's first `nvme_path`.
        ``non_blocking`` is a hint. Raises `UsageError`.
        """
        self._parts.parking.offload(include, str(getattr(device, "value", device)), pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took away; nothing happens when nothing is away."""
        self._parts.parking.reload()

    # -- full values: every call is collective -----------------------------------------------------------------------

    def gathered(self, parameters: Any, modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """Have ``parameters`` full inside the block (see `zero_partition.gathered`). Collective."""
        return self._parts.full.gathered(parameters, modifier_rank)

    def full_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the full parameter in the optimizer's precision. Collective."""
        return self._parts.full.param(parameter)

    def full_grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A copy of the full averaged gradient, or None when no rank has one. Collective."""
        return self._parts.full.grad(parameter)

    def full_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A copy of the full optimizer state ``key`` of a parameter. Collective."""
        return self._parts.full.state(parameter, key)

    def set_full_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace a parameter, its master included, by rank 0's ``value``. Collective."""
        self._parts.full.set_param(parameter, value)

    def set_full_grad(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the averaged gradient of a parameter by rank 0's ``value`` until the next step. Collective."""
        self._parts.full.set_grad(parameter, value)

    def set_full_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace the optimizer state ``key`` of a parameter by rank 0's ``value``. Collective."""
        self._parts.full.set_state(parameter, key, value)

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """On rank 0 the module's state dict with full values, in the module's dtypes and in host memory; None on other
        ranks. Collective. One unit is gathered at a time. Tied parameters share their storage."""
        return self._parts.full.state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `consolidated_state_dict` with torch.save to ``save_dir/save_filename``, complete or not at all; true.
        Collective. For other formats save a checkpoint and use ``zero-ckpt convert``."""
        self._parts.full.save(save_dir, save_filename, exclude_frozen_parameters)
        return True

    # -- facts: no call communicates ---------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.training_state.sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank."""
        return self.training_state.sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.training_state.sizes.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step by accumulating more or fewer micro-batches, from the next step on. Call it
        between steps, on every rank. Raises `UsageError` when micro-batches do not make up the size."""
        self.training_state.sizes.set_train(train_batch_size)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return self.training_state.learning_rates()

    def loss_scale(self) -> float:
        """The factor that the loss is multiplied with before backward."""
        return self.training_state.loss_scale()

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None before the first step."""
        return self.training_state.counters.norm

    def was_step_applied(self) -> bool:
        """Return whether the last `step` at a boundary updated the weights."""
        last = self.training_state.counters.last
        return last is not None and last.taken

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.partition.options.stage

    def config_report(self) -> str:
        """Every configuration value with its origin, as a table."""
        return report.config_report(self.resolved_config)

    def memory_report(self, by: Literal["kind", "unit", "tier"] = "kind") -> dict[str, int]:
        """Bytes of model state that this rank holds now, by kind, by unit or by tier (device, host, nvme)."""
        return report.memory_report(self.training_state, by)

    def memory_table(self) -> str:
        """MiB of model state that this rank holds now: one line per unit and tier, one column per kind."""
        return memory_table(memory_rows(self.partition, self.sharded_optimizer))

    def communication_table(self) -> str:
        """Collectives and MiB that this rank sent since the start, by phase and by unit or parameter."""
        return communication_table(self.ledger, steps=self.global_steps)

    def report(self) -> Report:
        """The page of this run so far, which a notebook shows; ``.save(path)`` writes it. Needs ``run_record.path``."""
        return report_of(self.resolved_config, self.instruments)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)
