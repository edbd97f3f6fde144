"""`deepspeed.initialize` and its engine."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from zero_core.assembly import assemble
from zero_core.config import precision_policy
from zero_core.engine import Engine
from zero_core.errors import UsageError
from zero_core.observing import supervisor
from zero_partition import owner_of

from . import VERSION
from .accelerator import compute_device
from .client_state import from_plain, to_plain
from .communication import init_distributed
from .construction import suspended
from .errors import UnsupportedError
from .getters import GETTERS, REFUSED, refuse
from .offload import ParameterOffload
from .optimizer import DeepSpeedOptimizer, ZeROOptimizer
from .parameters import adopt, release
from .settings import load_config, raw_config
from .state_files import state_files

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero_core.optimizers import Parameters
    from zero_core.schedules import Scheduler

logger = logging.getLogger("DeepSpeed")


class StageError(UsageError, AssertionError):
    """A call that the engine's stage does not allow."""


class DeepSpeedEngine(Engine):
    """An `Engine` with DeepSpeed's semantics where they differ.

    ``optimizer`` is a `ZeROOptimizer` (at stage 3 without an optimizer a `ParameterOffload`), ``config`` the user's
    dict, and parameters at stage 3 carry DeepSpeed's names (`ZeroParameter`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: dict[str, Any] = {}
        self._norm = 0.0
        offload = ParameterOffload(self.module, self.partition) if self.zero_optimization_stage() == 3 else None
        self._named: DeepSpeedOptimizer | None = offload
        if self.sharded_optimizer is not None:
            self._named = ZeROOptimizer(self, self.sharded_optimizer, offload)
        if offload is not None:
            adopt(self.module.parameters())

    @property
    def optimizer(self) -> Any:
        """The torch optimizer by DeepSpeed's names; None for inference below stage 3."""
        return self._named

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The torch optimizer itself."""
        return None if self.sharded_optimizer is None else self.sharded_optimizer.inner

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self._given

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.partition.data_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.partition.data_world_size

    dp_world_size = world_size
    deepspeed_io = Engine.data_loader

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def communication_data_type(self) -> torch.dtype:
        """What gradients travel in."""
        return precision_policy(self.resolved_config).wire_dtype

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add up gradients on this rank (stages 0 and 1)."""
        if self.zero_optimization_partition_gradients():
            raise StageError(
                f"no_sync() is for stages 0 and 1; stage {self.zero_optimization_stage()} reduces every micro-batch"
            )
        with super().no_sync():
            yield

    def step_without_schedule(self) -> None:
        """As `step`; the learning rate is left to the caller."""
        self._advance(lambda _scheduler: None)

    def _advance(self, schedule: Callable[[Scheduler], object]) -> None:
        super()._advance(schedule)
        if self._last is not None and self._last.taken:
            self._norm = self._last.norm

    def get_global_grad_norm(self) -> float | None:
        """Global norm, before clipping, of the last step that was taken, 0 when all were skipped; None before the first
        step."""
        return None if self._last is None else self._norm

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As `Engine.save_16bit_model`; at stage 3 only when the configuration asks for whole weights, else false."""
        if self.zero_optimization_stage() == 3 and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning(
                "save_16bit_model wrote nothing: set zero_optimization.stage3_gather_16bit_weights_on_model_save to "
                "true, or save a checkpoint and run zero_to_fp32.py"
            )
            return False
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As `Engine.save_checkpoint`; ``client_state`` may hold tensors, tuples and keys that are no strings.

        `load_checkpoint` returns it with the ``ds_version`` that wrote it. Small files beside have DeepSpeed's names
        (see `state_files`). Where ranks name different folders, as scripts with temporary ones do, the first rank's
        counts.
        """
        plain = to_plain({"ds_version": VERSION, **(client_state or {})})
        folder = self._first_folder("save_checkpoint", save_dir)
        return super().save_checkpoint(folder, tag, plain, save_latest, exclude_frozen_parameters)

    def files_beside(self, client_state: dict[str, Any]) -> dict[str, bytes]:
        """What `state_files` makes."""
        return state_files(self, from_plain(client_state))

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As `Engine.load_checkpoint`; ``(None, None)`` when no tag is given and ``load_dir`` has no file `latest`.

        Where ranks name different folders the first rank's counts, as in `save_checkpoint`.
        """
        folder = self._first_folder("load_checkpoint", load_dir)
        if tag is None and not (Path(folder) / "latest").is_file():
            logger.warning("no file 'latest' in %s and no tag given: nothing was loaded", folder)
            return None, None
        path, client_state = super().load_checkpoint(
            folder,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        return path, from_plain(client_state)

    save_fp16_model = save_16bit_model

    def _first_folder(self, call: str, folder: str | os.PathLike[str]) -> str:
        """The folder that the first rank names: a checkpoint is in one."""
        self._check_open(call)
        given = os.fspath(folder)
        told = self.partition.runtime.agree(call, "", given)
        if self.model_part.coordinator is not None:
            told = self.model_part.coordinator.all_gather_object(told[0])
        first = str(told[0])
        if first != given:
            logger.warning("%s(%r) on rank %d: the folder of rank 0 counts, %r", call, given, self.global_rank, first)
        return first

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that train the same part of the model."""
        return self.partition.data_rank

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that share a layer; 0 without an ``mpu``."""
        return self.model_part.place.rank

    get_tensor_parallel_rank = get_model_parallel_rank

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        """Whether ``obj`` has a length and items by number."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        """Whether ``obj`` is a `torch.utils.data.IterableDataset`."""
        return isinstance(obj, IterableDataset)

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS:
            return partial(GETTERS[name], self.resolved_config)
        if name in REFUSED:
            return refuse(name)
        return super().__getattr__(name)

    def destroy(self, whole: bool = True) -> None:
        """As `Engine.destroy`; the parameters are plain ones again."""
        super().destroy(whole)
        release(self.module.parameters())


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
    """Return ``(engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)``; see
    `zero_core.initialize`. Collective.

    ``config`` (or ``config_params``, or ``args.deepspeed_config``): a dict, the path of a JSON file, or urlsafe base64
    of JSON text. A model that an engine of these names still holds is taken from it first. ``mpu``: who shares a layer
    with whom, in tensor parallelism. Without an optimizer a schedule has no effect. A mesh with sequence parallelism
    (``mesh_param``) is not available.
    """
    logger.info("DeepSpeed info: version=%s, answered by zero-deepspeed", VERSION)
    _refuse_mesh(mesh_param)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    raw = raw_config(_one_source(args, config, config_params))
    if isinstance(model, nn.Module):
        _take_back(model)
    trains = optimizer is not None or raw.get("optimizer") is not None
    with suspended():
        engine = assemble(
            DeepSpeedEngine,
            model,
            lambda world_size: load_config(supervisor().config(raw, world_size), world_size, trains=trains),
            optimizer=optimizer,
            model_parameters=_some(model_parameters),
            training_data=training_data,
            lr_scheduler=lr_scheduler if trains else None,
            mpu=mpu,
            collate_fn=collate_fn,
            device=compute_device(),
        )
    engine._given = raw
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script's own use) and ``--deepspeed_config FILE`` to a parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script itself")
    group.add_argument("--deepspeed_config", type=str, default=None, help="a JSON file")
    return parser


def _one_source(args: Any, config: Any, config_params: Any) -> Any:
    """``config`` and ``config_params`` are one thing; ``args.deepspeed_config`` is for scripts that give neither."""
    given = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if given is not None and from_args is not None:
        raise UsageError("initialize: give the configuration once, as config or as args.deepspeed_config")
    if given is None and from_args is None:
        raise UsageError("initialize(config=…): expected a dict or the path of a JSON file; none was given")
    return given if given is not None else from_args


def _some(parameters: Parameters | None) -> Parameters | None:
    """An empty list of parameters is what frameworks pass for inference: nothing is chosen."""
    if parameters is None:
        return None
    listed: Any = list(parameters)
    return listed or None


def _take_back(model: nn.Module) -> None:
    """Destroy the engines that hold parts of ``model``: a new one takes their place."""
    for parameter in model.parameters():
        owner = owner_of(parameter)
        held = None if owner is None else owner.user
        if isinstance(held, DeepSpeedEngine):
            logger.info("initialize: the model's former engine is destroyed")
            held.destroy()


def _refuse_mesh(mesh_param: Any) -> None:
    size = mesh_param[1] if isinstance(mesh_param, (list, tuple)) and len(mesh_param) > 1 else 1
    if size > 1:
        raise UnsupportedError(
            f"initialize: mesh_param[1] is {size}, but sequence parallelism is not available; leave mesh_param out"
        )
