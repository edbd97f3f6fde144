"""`deepspeed.initialize`: an engine by DeepSpeed's names from a script's arguments."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from zero_core.assembly import assemble
from zero_core.errors import UsageError
from zero_core.supervision import supervisor
from zero_partition import owner_of

from . import VERSION
from .accelerator import compute_device
from .checkpoint_dialect import CheckpointNames
from .communication import init_distributed
from .construction import init_suspended
from .engine import DeepSpeedEngine
from .errors import UnsupportedError
from .leaf_modules import mark_configured_leaves
from .sequence import mpu_for, sequence_size
from .settings import load_config, raw_config

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero_core.optimizers import Parameters
    from zero_optim import Scheduler

logger = logging.getLogger("DeepSpeed")


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Scheduler | None]:
    """Construct the engine that trains ``model``, and return ``(engine, engine.optimizer, engine.training_dataloader,
    engine.lr_scheduler)``; an element other than the first is None where there is none. Collective.

    ``config`` (or ``config_params``, or ``args.deepspeed_config``): a dict, the path of a JSON file, or urlsafe base64
    of JSON text. ``optimizer``: a torch optimizer over the model's parameters, or a function that makes one from
    parameters; by default the one that the configuration names. ``model_parameters``: the parameters or param groups to
    train; by default all that require gradients. ``lr_scheduler``: a schedule, or a function that makes one from the
    optimizer; without an optimizer it has no effect. ``training_data``: a data set, from which the returned loader
    yields this rank's micro-batches, collated by ``collate_fn`` (default: torch's). ``mpu``: the ranks that share a
    layer (tensor parallelism) or a sequence (Ulysses, whose ``sequence_parallel_size`` the configuration may leave
    out).

    `init_distributed` is called first, with ``dist_init_required``; ``distributed_port`` has no effect. If a
    `DeepSpeedEngine` still holds the model, that engine is destroyed. Raises `UsageError` without a configuration or
    with two, `ConfigError` for a wrong one, `UnsupportedError` for a mesh with sequence parallelism (``mesh_param``),
    and `PartitionError` for a model that cannot be sharded.
    """
    logger.info("DeepSpeed info: version=%s, answered by zero-deepspeed", VERSION)
    _refuse_mesh(mesh_param)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    mpu = mpu_for(mpu, model)
    sequence = sequence_size(mpu)
    raw = raw_config(_given_config(args, config, config_params))
    if isinstance(model, nn.Module):
        _destroy_former_engines(model)
    trains = optimizer is not None or raw.get("optimizer") is not None
    with init_suspended():
        core = assemble(
            model,
            lambda ranks: load_config(supervisor().config(raw, ranks), ranks, trains=trains, sequence=sequence),
            optimizer=optimizer,
            model_parameters=_none_if_empty(model_parameters),
            training_data=training_data,
            lr_scheduler=lr_scheduler if trains else None,
            mpu=mpu,
            collate_fn=collate_fn,
            device=compute_device(),
            dialect=CheckpointNames(raw),
        )
    mark_configured_leaves(core.module, core.resolved_config.zero_optimization.leaf_module)
    engine = DeepSpeedEngine(core, raw, mpu)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script's own use) and ``--deepspeed_config
    FILE`` to ``parser``, and return it."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script itself")
    group.add_argument("--deepspeed_config", type=str, default=None, help="a JSON file")
    return parser


def _given_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration from the one argument that has it; ``config`` comes before ``config_params``, and
    ``args.deepspeed_config`` before ``args.deepscale_config``, its older name.

    Raises `UsageError` for none, and if ``args.deepspeed_config`` is given as well.
    """
    given = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if (older := getattr(args, "deepscale_config", None)) is not None:
        logger.warning("args.deepscale_config is deprecated; use args.deepspeed_config")
        from_args = older if from_args is None else from_args
    if given is not None and from_args is not None:
        raise UsageError("initialize: give the configuration once, as config or as args.deepspeed_config")
    if given is None and from_args is None:
        raise UsageError("initialize(config=…): expected a dict or the path of a JSON file; none was given")
    return given if given is not None else from_args


def _none_if_empty(parameters: Parameters | None) -> Parameters | None:
    """Return ``parameters`` as a list; None for None, and for no parameters: frameworks pass an empty list for
    inference."""
    if parameters is None:
        return None
    listed: Any = list(parameters)
    return listed or None


def _destroy_former_engines(model: nn.Module) -> None:
    """Destroy the `DeepSpeedEngine`s that hold parameters of ``model``, so that a new one can take them. Collective
    where there is one.
    """
    for parameter in model.parameters():
        owner = owner_of(parameter)
        held = None if owner is None else owner.user
        if isinstance(held, DeepSpeedEngine):
            logger.info("initialize: the model's former engine is destroyed")
            held.destroy()


def _refuse_mesh(mesh_param: Any) -> None:
    """Raise `UnsupportedError` if ``mesh_param``, the user's pair (data-parallel size, sequence-parallel size), asks
    for more than one sequence-parallel rank; anything else passes."""
    size = mesh_param[1] if isinstance(mesh_param, (list, tuple)) and len(mesh_param) > 1 else 1
    if size > 1:
        raise UnsupportedError(
            f"initialize: mesh_param[1] is {size}, but an mpu says which ranks share a sequence: leave mesh_param out, "
            "and give the mpu that UlyssesSPAttentionHF.register_with_transformers returns"
        )
