"""`Engine`: the calls of a training loop, each delegated to one part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from zero_ckpt import LoadReport
from zero_comm import Ledger, WeightBucket
from zero_optim import Scheduler
from zero_partition import BUCKET_BYTES, FullWeights, Partition, ShardedOptimizer, register_unless_wrapper
from zero_partition.micro_batches import LossOf, loss_in
from zero_settings import Config

from . import report
from .audit import Auditor
from .checkpoint import CustomLoad, LoadChoice, Resumed
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

    Call order of a micro-batch: ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``. `step` acts at
    the boundary of gradient accumulation and only counts otherwise. ``loss.backward()`` works too; then the loss is not
    divided, and under fp16 it has to be scaled: ``engine.scale(loss).backward()``.

    Other attributes are the model's, as ``engine.name``. After `destroy` most calls raise `UsageError`.

    Attributes:
        module: the user's model.
        optimizer: the torch optimizer, its param groups live; None for inference.
        sharded_optimizer: wraps it: its step clips, updates the shards and publishes, on all ranks or on none.
        lr_scheduler: stepped after each optimizer step that was taken; may be assigned.
        training_dataloader: loader whose position is checkpointed, by default over ``training_data``; may be assigned.
        config: the user's configuration as given (a dict); ``resolved_config`` has every value.
        device: where the model computes.
        partition: which rank owns what.
        global_steps, micro_steps, skipped_steps, global_samples: counters since the start of training.
        ledger: bytes sent, by phase and unit.
        monitor: writes metrics; ``monitor.write_events([("name", value, samples)])`` adds your own.
        instruments: timers, profilers and reports.
        checkpointing: stores the inputs of `zero_core.checkpointing.checkpoint` inside this engine's forward.
        observer: called with each loss and step result; may be assigned.
        audit: compares weights and states between ranks, every ``audit_every`` steps.
        load_report: what the last `load_checkpoint` did to each name (a `zero_ckpt.LoadReport`); None before.
        model_part: the part of the full model that this rank trains, under an mpu.
        offloading: the tiers that are not on the device; `offloading.table()` is the overlap report.
        compiled_modules: names of the modules that `compile` compiled, each as one graph unless its code has breaks.
        training_state: ``state`` as given: what is trained; the ``parts``, to which calls are delegated, share it."""

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
    register_forward_pre_hook = register_unless_wrapper

    def __init__(self, state: TrainingState, parts: EngineParts) -> None:
        super().__init__()
        self.module = state.module
        self.training_state = state
        self._parts = parts
        state.partition.set_user(self)

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output, under the configured autocast and casts of inputs. Collective at stage
        3. If it fails while other ranks may wait for this one, every rank raises."""
        return self._parts.training.forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate ``loss`` (a scalar), divided by the accumulation steps unless ``scale_wrt_gas`` is false;
        return the loss so divided, detached, in float32 at least, without the loss scale. Gradients are reduced on the
        way: at the accumulation boundary at stages 0 and 1, each time at stages 2 and 3. Raises `UsageError` for a loss
        that is no scalar or requires no gradient. Collective when it reduces."""
        return self._parts.training.backward(loss, retain_graph=retain_graph, divide=scale_wrt_gas)

    def train_batch(self, batches: Iterable[Any], loss_fn: LossOf = loss_in) -> torch.Tensor:
        """Take one optimizer step over this rank's ``gradient_accumulation_steps`` micro-batches: those in ``batches``,
        or, of an iterator, the next ones. Return their mean loss, detached. At stage 3 each unit is read twice per
        step, not per micro-batch, and runs forward again in backward. ``loss_fn``: returns the loss, from a model's
        output and its micro-batch. Raises `UsageError` on every rank if one has too few. Collective."""
        return self._parts.training.train_batch(batches, loss_fn)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` (a scalar) times the loss scale, for ``engine.scale(loss).backward()``. It is not divided by
        the accumulation steps. Allows plain backward passes under fp16 until the next `step`."""
        return self._parts.training.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count the micro-batch. At the accumulation boundary also clip the gradients, update and publish the weights,
        step the scheduler (with ``lr_kwargs``), and save if ``checkpoint.interval`` is due; collective then. Raises
        `NonFiniteGradientError` on every rank, weights unchanged, for a non-finite gradient without a loss scale; on an
        accelerator a later call may raise it, such as the next `step`."""
        self._parts.training.step(stepping_with(lr_kwargs))

    def step_without_schedule(self) -> None:
        """Do what `step` does, without stepping the learning-rate scheduler."""
        self._parts.training.step(lambda _scheduler: None)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch ends an accumulation."""
        return self._parts.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let the current and all later micro-batches each end an accumulation or, if ``is_boundary`` is false, none of
        them, instead of counting to the configured number. Every rank makes the same call. `backward` still divides by
        that number."""
        self._parts.accumulation.set_boundary(is_boundary)

    def virtual_rank(self) -> int:
        """Return the index of the current micro-batch among those of all ranks in this step: j * N + r for the j-th of
        rank r of N. Under ``deterministic.across_world_sizes`` the micro-batch's results depend on j, r and N through
        this alone."""
        return self._parts.accumulation.virtual_rank()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside the block without reducing them. Raises `UsageError` if every backward pass
        reduces: at stages 2 and 3, with ``reduce_each_micro_batch``, and with virtual ranks."""
        return self._parts.accumulation.no_sync()

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Let ranks call forward a different number of times inside the block (generation, evaluation; no backward). A
        rank that reaches the end first takes part in the others' gathers until all are done. Collective."""
        self.training_state.check_open("synced")
        with self._parts.failures.abort_all_on_failure(), self.partition.runtime.synced():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients accumulated so far (zero them if ``set_to_none`` is false), as the module's and the
        optimizer's ``zero_grad`` do. `step` does it too. Every rank calls it at the same point."""
        self.module.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the averaged gradients to the global norm ``max_norm`` now, between backward and step at a boundary;
        return the norm before. Collective."""
        return self._parts.training.clip_gradients(max_norm)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Apply torch.compile to the module from its next call on: as one graph at stages 0 to 2, by unit at stage 3.
        ``compile_kwargs``: for `torch.compile`. Raises `UsageError` for DeepCompile's ``schedule``, for compiled
        autograd, and at stage 3 for modes that use CUDA graphs."""
        compile_module(self.training_state, backend, compile_kwargs, schedule, compiled_autograd_enabled)

    @property
    def is_compiled(self) -> bool:
        """Return whether `compile` has compiled the module or one inside."""
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
        """Return a loader of this rank's samples of ``dataset``, shuffled for ``route="train"`` (see `RankLoader`).
        ``batch_size``: samples per batch and rank, by default the micro-batch. ``data_sampler``: replaces the
        `RankSampler`. ``collate_fn``: by default `initialize`'s. ``num_local_io_workers``: processes that prepare
        batches ahead. Raises `UsageError` for a data set that is not map-style."""
        workers = num_local_io_workers
        return self._parts.loaders.make(dataset, batch_size, route, pin_memory, data_sampler, collate_fn, workers)

    def destroy(self, unshard: bool = True) -> None:
        """Unshard the parameters, remove all hooks and leave the process groups, once. Collective. Waits for
        checkpoints that are written in the background. ``unshard``: false leaves sharded parameters released, for
        models that do not fit on one rank. Does nothing in a process that was forked from the rank. Raises
        `zero_ckpt.CheckpointError` if such a checkpoint failed."""
        lifetime = self.training_state.lifetime
        if not lifetime.destroyed and lifetime.process == os.getpid():
            lifetime.destroyed = True
            self._parts.close(self.training_state, unshard)

    # -- checkpoints, and states moved off the device ----------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full training state to ``save_dir/tag`` (default ``global_step{N}``), atomically; return true.

        ``client_state``: plain data, which `load_checkpoint` returns. With ``checkpoint.writer.decoupled`` the call
        returns before the files are written; a failed save then raises from a later `step`, `save_checkpoint`,
        `load_checkpoint` or `destroy`. ``exclude_frozen_parameters``: leave frozen ones out. Collective. Raises on
        every rank: `zero_ckpt.CheckpointError`, inside an accumulation `UsageError`."""
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
        """Load ``load_dir/tag`` (default: the newest complete one), of any world size and stage; return (path, client
        state). ``load_module_strict``: false loads what fits by name. ``load_module_only``: load only weights.
        ``custom_load_fn(src=tensors by name, dst=module)`` loads the weights instead of the match by name: it runs on
        every rank with the module unsharded, and every rank gets rank 0's result. `load_report` says what was loaded,
        converted, defaulted and ignored. Collective. Raises `zero_ckpt.CheckpointError` on every rank."""
        wanted = LoadChoice(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only and self.sharded_optimizer is not None,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            custom=custom_load_fn,
        )
        return self._parts.checkpoints.load(load_dir, tag, wanted)

    def resume(self, load_dir: str | os.PathLike[str]) -> Resumed | None:
        """Load the newest state of this job, of any world size, and return where it continues; None if there is none.

        The newest copy in the nodes' memory (``checkpoint.in_memory``; a folder for each ``load_dir`` by default) is
        loaded if it is complete and not older than the newest checkpoint in ``load_dir``, else, or if the copy cannot
        be loaded (with a warning), that checkpoint. Collective. Raises `zero_ckpt.CheckpointError` on every rank when
        there are checkpoints and none can be loaded."""
        return self._parts.checkpoints.resume(load_dir)

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move this rank's model states to ``device``: "cpu", or "nvme" for the first `nvme_path` of the configuration.
        Until `reload_states` most calls of the engine raise `UsageError`. ``include``: which of
        `zero_core.parking.KINDS`, by default all. ``non_blocking`` is ignored. Raises `UsageError` for other names,
        without an `nvme_path`, and if states are offloaded already. Collective."""
        self._parts.parking.offload(include, str(getattr(device, "value", device)), pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` moved, if anything. ``non_blocking`` is ignored. Collective."""
        self._parts.parking.reload()

    # -- full values: every call is collective -----------------------------------------------------------------------

    def gathered(self, parameters: Any, modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """Gather ``parameters``, one or several, in full for the block. ``modifier_rank``: the rank whose changes
        become all ranks' (see `zero_partition.gathered`). Collective."""
        return self._parts.full.gathered(parameters, modifier_rank)

    def full_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of the full parameter, from its master if it has one. Collective."""
        return self._parts.full.param(parameter)

    def full_grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the full averaged gradient, after backward; None if no rank has one. Collective."""
        return self._parts.full.grad(parameter)

    def full_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Return a copy of a parameter's full optimizer state ``key``, such as "exp_avg". Collective."""
        return self._parts.full.state(parameter, key)

    def set_full_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace a parameter and its master by rank 0's full ``value``. Collective."""
        self._parts.full.set_param(parameter, value)

    def set_full_grad(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the averaged gradient of a parameter by rank 0's full ``value`` until the next step. Collective."""
        self._parts.full.set_grad(parameter, value)

    def set_full_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace a parameter's optimizer state ``key``, such as "exp_avg", by rank 0's full ``value``. Collective."""
        self._parts.full.set_state(parameter, key, value)

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return the module's state dict with full values in its own dtypes, in host memory, on rank 0; None on other
        ranks. Gathers one unit at a time. Tied parameters share their storage. Collective."""
        return self._parts.full.state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `consolidated_state_dict` with torch.save to ``save_dir/save_filename``, atomically; return true.
        Collective. For other formats save a checkpoint and use ``zero-ckpt convert``."""
        self._parts.full.save(save_dir, save_filename, exclude_frozen_parameters)
        return True

    def iter_full_weights(self, bucket_bytes: int = BUCKET_BYTES, **choices: Any) -> Iterator[WeightBucket]:
        """Iterate over the full weights in buckets of at most ``bucket_bytes``, whose tensors are valid until the next
        bucket; each unit is gathered once. ``choices``: arguments of `full_weights`. Collective: every rank, to the
        end."""
        return self.full_weights(**choices).buckets(bucket_bytes)

    def full_weights(self, dtype: torch.dtype | None = None, **choices: bool) -> FullWeights:
        """Return the full weights as an inference server takes them. Its ``metadata()`` gathers nothing; iterating is
        collective. ``dtype``, and ``choices`` (``buffers``, ``merge_adapters``): see `zero_partition.FullWeights`."""
        check = partial(self.training_state.check_open, "full_weights")
        return FullWeights(self.partition, self.module, dtype=dtype, check=check, **choices)

    # -- properties of the run: no call communicates -----------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples per optimizer step over all ranks."""
        return self.training_state.sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per micro-batch and rank."""
        return self.training_state.sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per optimizer step."""
        return self.training_state.sizes.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Accumulate as many micro-batches per step as ``train_batch_size`` samples over all ranks need. Call it
        between steps, on every rank. Raises `UsageError` for a size that is no multiple of a micro-batch per rank, and
        for any change under virtual ranks."""
        self.training_state.sizes.set_train(train_batch_size)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group. Raises `UsageError` without an optimizer."""
        return self.training_state.learning_rates()

    def loss_scale(self) -> float:
        """Return the factor by which the loss is multiplied before backward; 1.0 unless under fp16."""
        return self.training_state.loss_scale()

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's global gradient norm before clipping; None before a step. May wait for the device."""
        return self.training_state.counters.norm

    def was_step_applied(self) -> bool:
        """Return whether the last boundary's `step` updated the weights; false before one. May wait for the device."""
        last = self.training_state.counters.last
        return last is not None and last.taken

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return self.partition.options.stage

    def config_report(self) -> str:
        """Return every configuration value with its origin, as a table."""
        return report.config_report(self.resolved_config)

    def memory_report(self, by: Literal["kind", "unit", "tier"] = "kind") -> dict[str, int]:
        """Return the bytes of model state that this rank holds now, by kind (such as "master"), unit, or tier (device,
        host, nvme)."""
        return report.memory_report(self.training_state, by)

    def memory_table(self) -> str:
        """Return the MiB of model state that this rank holds now: one line per unit and tier, one column per kind."""
        return memory_table(memory_rows(self.partition, self.sharded_optimizer))

    def communication_table(self) -> str:
        """Return the collectives and MiB that this rank sent since the start, by phase and by unit or parameter."""
        return communication_table(self.ledger, steps=self.global_steps)

    def report(self) -> Report:
        """Return the report of this run so far, to show or ``.save(path)``. Raises `UsageError` without a record."""
        return report_of(self.resolved_config, self.instruments)

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute ``name``, which the engine does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)
