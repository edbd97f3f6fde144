"""The engine that `deepspeed.initialize` returns."""

from __future__ import annotations

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

from zero_config import Config
from zero_core.delegation import Delegated
from zero_core.engine import Engine
from zero_core.errors import UsageError
from zero_core.state import TrainingState
from zero_precision import DynamicLossScale

from . import VERSION
from .client_state import from_plain, to_plain
from .getters import GETTERS, REFUSED, refuse
from .offload import ParameterOffload
from .optimizer import DeepSpeedOptimizer, ZeROOptimizer
from .parameters import adopt, release
from .state_files import state_files

if TYPE_CHECKING:
    pass

logger = logging.getLogger("DeepSpeed")


class StageError(UsageError, AssertionError):
    """A call that the engine's stage does not allow."""


class DeepSpeedEngine(nn.Module):
    """An `Engine` by DeepSpeed's names, and with DeepSpeed's semantics where they differ.

    It holds an `Engine` and hands on to it what both call alike. ``optimizer`` is a `ZeROOptimizer` (at stage 3 without
    an optimizer a `ParameterOffload`), ``config`` the user's dict, and parameters at stage 3 carry DeepSpeed's names
    (`ZeroParameter`). Every name that DeepSpeed's engine has not either is the model's.

    Attributes:
        zero_engine: the engine that trains.
        module: the user's model.
        config: the configuration as it was given.
    """

    zero_engine: Engine
    module: nn.Module

    backward = Delegated[Any]("zero_engine")
    scale = Delegated[Any]("zero_engine")
    step = Delegated[Any]("zero_engine")
    is_gradient_accumulation_boundary = Delegated[Any]("zero_engine")
    set_gradient_accumulation_boundary = Delegated[Any]("zero_engine")
    synced = Delegated[Any]("zero_engine")
    zero_grad = Delegated[Any]("zero_engine")
    clip_grad_norm_ = Delegated[Any]("zero_engine")
    compile = Delegated[Any]("zero_engine")
    data_loader = Delegated[Any]("zero_engine")
    deepspeed_io = Delegated[Any]("zero_engine", "data_loader")
    virtual_rank = Delegated[Any]("zero_engine")
    resume = Delegated[Any]("zero_engine")
    offload_states = Delegated[Any]("zero_engine")
    reload_states = Delegated[Any]("zero_engine")
    gathered = Delegated[Any]("zero_engine")
    full_param = Delegated[Any]("zero_engine")
    full_grad = Delegated[Any]("zero_engine")
    full_state = Delegated[Any]("zero_engine")
    set_full_param = Delegated[Any]("zero_engine")
    set_full_grad = Delegated[Any]("zero_engine")
    set_full_state = Delegated[Any]("zero_engine")
    consolidated_state_dict = Delegated[Any]("zero_engine")
    _consolidated_16bit_state_dict = Delegated[Any]("zero_engine", "consolidated_state_dict")
    _zero3_consolidated_16bit_state_dict = Delegated[Any]("zero_engine", "consolidated_state_dict")
    train_batch_size = Delegated[Any]("zero_engine")
    train_micro_batch_size_per_gpu = Delegated[Any]("zero_engine")
    gradient_accumulation_steps = Delegated[Any]("zero_engine")
    set_train_batch_size = Delegated[Any]("zero_engine")
    set_train_micro_batch_size = Delegated[Any]("zero_engine.training_state.sizes", "set_micro")
    get_lr = Delegated[Any]("zero_engine")
    loss_scale = Delegated[Any]("zero_engine")
    was_step_applied = Delegated[Any]("zero_engine")
    zero_optimization_stage = Delegated[Any]("zero_engine")
    config_report = Delegated[Any]("zero_engine")
    memory_report = Delegated[Any]("zero_engine")
    memory_table = Delegated[Any]("zero_engine")
    communication_table = Delegated[Any]("zero_engine")
    report = Delegated[Any]("zero_engine")
    lr_scheduler = Delegated[Any]("zero_engine")
    training_dataloader = Delegated[Any]("zero_engine")
    global_steps = Delegated[int]("zero_engine")
    micro_steps = Delegated[int]("zero_engine")
    skipped_steps = Delegated[int]("zero_engine")
    global_samples = Delegated[int]("zero_engine")
    monitor = Delegated[Any]("zero_engine")
    instruments = Delegated[Any]("zero_engine")
    checkpointing = Delegated[Any]("zero_engine")
    observer = Delegated[Any]("zero_engine")
    audit = Delegated[Any]("zero_engine")
    offloading = Delegated[Any]("zero_engine")
    ledger = Delegated[Any]("zero_engine")
    load_report = Delegated[Any]("zero_engine")
    model_part = Delegated[Any]("zero_engine")
    partition = Delegated[Any]("zero_engine")
    device = Delegated[torch.device]("zero_engine")
    resolved_config = Delegated[Config]("zero_engine")
    sharded_optimizer = Delegated[Any]("zero_engine")
    basic_optimizer = Delegated[Any]("zero_engine", "optimizer")
    is_compiled = Delegated[bool]("zero_engine")
    compiled_modules = Delegated[Any]("zero_engine")
    global_rank = Delegated[int]("zero_engine.partition", "data_rank")
    world_size = Delegated[int]("zero_engine.partition", "data_world_size")
    dp_world_size = Delegated[int]("zero_engine.partition", "data_world_size")

    def __init__(self, core: Engine, config: dict[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "zero_engine", core)  # not as a submodule: parameters are the model's alone
        self.module = core.module
        self.config = config
        offload = ParameterOffload(core.module, core.partition) if core.zero_optimization_stage() == 3 else None
        self._named: DeepSpeedOptimizer | None = offload
        if core.sharded_optimizer is not None:
            self._named = ZeROOptimizer(core, core.sharded_optimizer, offload)
        if offload is not None:
            adopt(core.module.parameters())
        core.partition.set_user(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output unchanged."""
        return self.zero_engine(*args, **kwargs)

    @property
    def optimizer(self) -> Any:
        """The torch optimizer by DeepSpeed's names; None for inference below stage 3."""
        return self._named

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients travel."""
        return self.zero_engine.training_state.precision.wire_dtype

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add up gradients on this rank (stages 0 and 1)."""
        if self.zero_optimization_stage() >= 2:
            raise StageError(
                f"no_sync() is for stages 0 and 1; stage {self.zero_optimization_stage()} reduces every micro-batch"
            )
        with self.zero_engine.no_sync():
            yield

    def get_global_grad_norm(self) -> float | None:
        """Global norm, before clipping, of the last step that was taken, 0 when all were skipped; None before the first
        step."""
        counters = self.zero_engine.training_state.counters
        if counters.last is None:
            return None
        return 0.0 if counters.last_taken is None else counters.last_taken.norm

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As `Engine.save_16bit_model`; at stage 3 only when the configuration asks for full weights, else false."""
        asked = self.resolved_config.zero_optimization.stage3_gather_16bit_weights_on_model_save
        if self.zero_optimization_stage() == 3 and not asked:
            logger.warning(
                "save_16bit_model wrote nothing: set zero_optimization.stage3_gather_16bit_weights_on_model_save to "
                "true, or save a checkpoint and run zero_to_fp32.py"
            )
            return False
        return self.zero_engine.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

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
        folder = self._first_folder("save_checkpoint", save_dir)
        return self.zero_engine.save_checkpoint(folder, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
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
        path, client_state = self.zero_engine.load_checkpoint(
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
        self.zero_engine.training_state.check_open(call)
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
        return self.global_rank

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that share a layer; 0 without an ``mpu``."""
        return int(self.model_part.place.rank)

    get_tensor_parallel_rank = get_model_parallel_rank

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        """Return whether ``obj`` has a length and items by number."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        """Return whether ``obj`` is a `torch.utils.data.IterableDataset`."""
        return isinstance(obj, IterableDataset)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step over all ranks, samples per micro-batch and rank, micro-batches per step."""
        sizes = self.zero_engine.training_state.sizes
        return sizes.train, sizes.micro, sizes.steps

    def get_mom(self) -> list[Any]:
        """The ``momentum``, else the ``betas``, of each param group; 0.0 for a group with neither."""
        groups = self.zero_engine.training_state.check_trainable("get_mom").param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """The ``type`` that each param group carries; 0.0 for a group without."""
        groups = self.zero_engine.training_state.check_trainable("get_type").param_groups
        return [group.get("type", 0.0) for group in groups]

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale adapts itself."""
        return self.sharded_optimizer is not None and isinstance(self.sharded_optimizer.loss_scale, DynamicLossScale)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters and of accumulated gradients."""
        precision = self.zero_engine.training_state.precision
        return precision.param_dtype, precision.accumulate_dtype

    def empty_partition_cache(self) -> None:
        """Give back the accelerator memory that torch keeps for later; parameters are released after each pass."""
        self.zero_engine.training_state.check_open("empty_partition_cache")
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def destroy(self, unshard: bool = True) -> None:
        """As `Engine.destroy`; the parameters are plain ones again."""
        self.zero_engine.destroy(unshard)
        release(self.module.parameters())

    def __getattr__(self, name: str) -> Any:
        if name in GETTERS:
            return partial(GETTERS[name], self.resolved_config)
        if name in REFUSED:
            return refuse(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


class CheckpointNames:
    """The content of a checkpoint of DeepSpeed's names besides its own files (a `zero_core.checkpoint.Dialect`).
    ``config``: as given."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def client_state(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``given``, and the ``ds_version`` that writes it, as plain data."""
        plain: dict[str, Any] = to_plain({"ds_version": VERSION, **given})
        return plain

    def files_beside(self, state: TrainingState, client_state: dict[str, Any]) -> Mapping[str, bytes]:
        """Return what `state_files` makes."""
        return state_files(state, self._config, from_plain(client_state))
