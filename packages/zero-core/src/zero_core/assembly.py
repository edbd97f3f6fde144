"""`initialize`: build an engine from a model and a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zero_comm import EngineGroups, default_device, init, starting_together
from zero_optim import Scheduler
from zero_partition import GRID, Partition, PartitionOptions, ShardedOptimizer, UnitLimits, leaf_marker, partition
from zero_precision import autocast_dtypes, parse_dtype
from zero_settings import Config, autocast_modules, loss_scale, precision_policy
from zero_settings.log_level import set_log_levels

from . import kernels
from .checkpoint import Dialect, OwnDialect
from .composition import compose
from .engine import Engine
from .errors import UsageError
from .instruments import ledger_for, memory_rows, memory_table, prints_progress
from .model_parallel import ModelPart, model_parallel
from .monitors import check_clients
from .offloading import Offloading, state_block
from .optimizers import Parameters, build_optimizer
from .process_groups import agree_on_hyperparameters, open_groups, shard_alignment, weight_codecs
from .recording import open_record
from .report import config_report, start_line, startup_report
from .schedules import build_scheduler
from .state import Attached, BatchSizes, TrainingState
from .supervision import supervisor
from .text import say
from .virtual_ranks import micro_batches

logger = logging.getLogger("zero_core")


def initialize(
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None,
    *,
    mpu: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    device: torch.device | str | None = None,
) -> tuple[Engine, Optimizer | None, Any, Scheduler | None]:
    """Shard ``model`` over all ranks; return ``(engine, optimizer, dataloader, scheduler)``, None where there is none.

    ``config``: a dict, the path of a JSON file, or a `Config`. ``optimizer``: a torch optimizer over the model's
    parameters, or a function that makes one from parameters; by default the one that the configuration names.
    ``model_parameters``: the parameters or param groups to train; by default all that require gradients.
    ``lr_scheduler``: a schedule, or a function that makes one from the optimizer. ``training_data``: a map-style data
    set; the returned data loader yields this rank's micro-batches of it, shuffled and collated by ``collate_fn``
    (default: torch's). ``mpu``: tensor- and sequence-parallel groups (see `model_parallel`); states are sharded over
    the ranks that train the same part of the model. ``device``: by default this rank's accelerator, else the CPU.

    Initialises torch.distributed if it is not initialised. ``engine.module`` is ``model``; its parameters keep their
    identity and get rank 0's values. Raises `ConfigError`, `UsageError` or `PartitionError`. Collective."""
    where = torch.device(device) if device is not None else None
    if config is None:
        raise UsageError("initialize(config=…): expected a dict, the path of a JSON file or a Config; none was given")
    engine = assemble(
        model,
        lambda world_size: Config.load(supervisor().config(config, world_size), world_size=world_size),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        device=where,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def assemble(
    model: nn.Module | None,
    load: Callable[[int], Config],
    *,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None,
    mpu: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    device: torch.device | None = None,
    dialect: Dialect | None = None,
) -> Engine:
    """Build an engine: the work of `initialize`, and of packages that answer to another library's names. Arguments and
    errors are those of `initialize`, but for two. ``load``: returns the configuration, given the number of
    data-parallel ranks. ``dialect``: the other library's names in checkpoints, None for none. Collective."""
    set_log_levels()
    init(device)
    place = model_parallel(mpu)
    with starting_together("zero_core.initialize"):
        if not isinstance(model, nn.Module):
            raise UsageError(f"initialize(model=…): expected a torch.nn.Module, got {type(model).__name__}")
        _refuse_lazy(model)
        resolved = load(place.ranks)
        place.check_sequence(resolved.sequence_parallel_size)
        on = default_device(device)
        if on.type != "cpu":
            torch.accelerator.set_device_index(on)
        check_clients(resolved)
        record, ledger = open_record(resolved, on), ledger_for(resolved, dist.get_rank())
        if record is not None:
            ledger = record.ledger(ledger)
    with starting_together("zero_core.initialize"):  # no rank may fail and exit while others still connect
        groups = open_groups(resolved, place.data_rows, ledger)
        model_part = place.open()
    resolved = resolved.with_absolute_paths()  # the script may change its working directory
    with _abort_all_on_failure(groups, model_part):
        torch_optimizer = build_optimizer(optimizer, resolved, model, model_parameters, on)
        agree_on_hyperparameters(groups.control, torch_optimizer)
        options = _partition_options(resolved, model)
        sink = None if record is None else record.sink()
        offloading = Offloading(resolved, model, dist.get_rank(), on, supervisor().budget, sink)
        parts = partition(
            model,
            groups,
            options,
            device=on,
            trainable=[p for group in torch_optimizer.param_groups for p in group["params"]] if torch_optimizer else [],
            residency=offloading.parameter_store(options.policy.param_dtype),
            make_states=offloading.state_tier(torch_optimizer),
        )
        sharded = _sharded_optimizer(torch_optimizer, parts, resolved, model_part)
        state = TrainingState(
            module=model,
            partition=parts,
            optimizer=sharded,
            config=resolved,
            ledger=ledger,
            model_part=model_part,
            micro_batches=micro_batches(resolved, parts, model),
            sizes=BatchSizes(resolved),
            reports=dist.get_rank() == 0,
            attached=Attached(scheduler=build_scheduler(lr_scheduler, resolved, torch_optimizer)),
        )
        engine = Engine(state, compose(state, offloading, dialect or OwnDialect(), collate_fn, record))
        _report_start(state)
        if training_data is not None:
            engine.training_dataloader = engine.data_loader(training_data)
        engine.observer = supervisor().observer(engine)
    if hasattr(mpu, "join_engine"):
        mpu.join_engine(groups)
    return engine


def _refuse_lazy(model: nn.Module) -> None:
    """Raise `UsageError` for a model with parameters or buffers of torch's lazy modules, which have no shape yet."""
    lazy = next((name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)), None)
    if lazy is not None:
        raise UsageError(
            f"initialize(model=…): '{lazy}' of a lazy module has no shape yet. Call the model with a first batch, "
            "then build the optimizer and call initialize."
        )


def _report_start(state: TrainingState) -> None:
    """On rank 0 print the line on what begins, unless ``steps_per_print`` turns progress off, and log the start-up
    report; with ``dump_state`` print the report, the configuration and the memory table."""
    if state.reports:
        if prints_progress(state.config):
            say(start_line(state))
        logger.info("%s", startup_report(state.config, state.partition))
        if state.config.dump_state:
            memory = memory_table(memory_rows(state.partition, state.optimizer))
            say("\n".join([startup_report(state.config, state.partition), config_report(state.config), memory]))


@contextmanager
def _abort_all_on_failure(groups: EngineGroups, model_part: ModelPart) -> Iterator[None]:
    """If the block raises on this rank, make collectives on all ranks raise with that cause, so that none waits."""
    try:
        yield
    except BaseException as failure:
        groups.abort(failure)
        model_part.abort(failure)
        raise


def _partition_options(config: Config, model: nn.Module) -> PartitionOptions:
    """Return the partition's options that ``config`` asks for: stage, dtypes, sizes in elements, codecs, leaf
    modules."""
    zero = config.zero_optimization
    policy = precision_policy(config)
    weight_codec, frozen_codec = weight_codecs(config)
    return PartitionOptions(
        stage=zero.stage,
        policy=policy,
        limits=supervisor().limits(
            UnitLimits(
                max_numel=zero.unit_max_numel,
                min_numel=zero.unit_min_numel,
                persistence_threshold=zero.stage3_param_persistence_threshold if zero.stage >= 3 else 0,
            )
        ),
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        max_live_numel=zero.stage3_max_live_parameters,
        bucket_numel=zero.reduce_bucket_size,
        reduce_each_micro_batch=config.reduce_each_micro_batch,
        compute_dtypes=_autocast_dtypes(config, model),
        alignment=shard_alignment(config),
        entry_alignment=max(state_block(config), GRID) if config.virtual_ranks else state_block(config),
        is_leaf=leaf_marker(zero.leaf_module.classes, zero.leaf_module.names, zero.leaf_module.name_suffixes),
        weight_codec=weight_codec,
        frozen_codec=frozen_codec,
        virtual_ranks=config.virtual_ranks,
        keeps_float64=not (config.fp16.enabled or config.bf16.enabled or config.data_types.param_dtype),
    )


def _autocast_dtypes(config: Config, model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype to gather each parameter in under torch_autocast, by name; empty where autocast is off."""
    section = config.torch_autocast
    if not section.enabled:
        return {}
    return autocast_dtypes(model, parse_dtype(section.dtype or "bf16"), eligible=autocast_modules(config))


def _sharded_optimizer(
    optimizer: Optimizer | None, parts: Partition, config: Config, model_part: ModelPart
) -> ShardedOptimizer | None:
    """Return ``optimizer`` made to step this rank's shards, with ``config``'s clipping and loss scale; None for
    None."""
    if optimizer is None:
        return None
    return ShardedOptimizer(
        optimizer,
        parts,
        clip=config.gradient_clipping,
        loss_scale=loss_scale(config),
        skip_non_finite=config.bf16.enabled and config.bf16.check_grad_overflow is True,
        norm=kernels.NativeNormSquared(),
        squares=kernels.NativeGridSquares(),
        parts=model_part.norms,
    )
