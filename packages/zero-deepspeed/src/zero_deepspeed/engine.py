"""The engine that `deepspeed.initialize` returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from zero_core.engine import Engine
from zero_core.errors import UsageError
from zero_partition import register_unless_wrapper
from zero_partition.micro_batches import LossOf, loss_in
from zero_precision import DynamicLossScale

from .checkpoint_places import agreed_place, newest
from .client_state import from_plain
from .communication import get_world_group
from .delegated_names import DelegatedNames
from .errors import UnsupportedError
from .getters import GETTERS, REFUSED, refuse
from .offload import ParameterOffload
from .optimizer import DeepSpeedOptimizer, ZeROOptimizer
from .parameters import add_names, remove_names
from .whole_steps import WholeSteps

logger = logging.getLogger("DeepSpeed")


class StageError(UsageError, AssertionError):
    """A call is not allowed at the engine's stage; also an AssertionError, which DeepSpeed raises there."""


class DeepSpeedEngine(DelegatedNames):
    """An `Engine` by DeepSpeed's names, and with DeepSpeed's semantics where they differ.

    Names with the same meaning are those of the `Engine` that it holds, ``core`` (`DelegatedNames`). ``optimizer`` is a
    `ZeROOptimizer` (at stage 3 without an optimizer a `ParameterOffload`, at stage 0 in float32 the torch optimizer
    itself), and parameters at stage 3 have DeepSpeed's attributes (`ZeroParameter`). Any other attribute is one of
    `GETTERS`, or is looked up in the model.

    Attributes:
        zero_engine: the engine that trains.
        module: the user's model.
        config: the configuration as it was given, as a dict.
        mpu: as it was given; None without one.
        inside_no_sync_ctxt: whether a block of `no_sync` or `coalesce_grad_reduction` is open.
    """

    register_forward_pre_hook = register_unless_wrapper

    def __init__(self, core: Engine, config: dict[str, Any], mpu: Any = None) -> None:
        super().__init__()
        object.__setattr__(self, "zero_engine", core)  # not as a submodule: parameters are the model's alone
        self.module = core.module
        self.config = config
        self.mpu = mpu
        self.inside_no_sync_ctxt = False
        self._whole_steps = WholeSteps(core)
        offload = ParameterOffload(core.module, core.partition) if core.zero_optimization_stage() == 3 else None
        self._named_optimizer: DeepSpeedOptimizer | Optimizer | None = offload
        if core.sharded_optimizer is not None:
            wraps = core.zero_optimization_stage() > 0 or core.training_state.precision.param_dtype != torch.float32
            named = ZeROOptimizer(core, core.sharded_optimizer, offload)
            self._named_optimizer = named if wraps else core.sharded_optimizer.inner
        if offload is not None:
            add_names(core.module.parameters())
        core.partition.set_user(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output unchanged, as `Engine.forward`. Collective at stage 3."""
        return self.zero_engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate ``loss`` (a scalar), divided by the accumulation steps unless ``scale_wrt_gas`` is false, and
        return the loss so divided, detached, in the dtype of ``loss``.

        ``retain_graph``: as in torch. Collective where gradients are reduced: at the accumulation boundary at stages 0
        and 1, each time at stages 2 and 3. Raises `UsageError` for a loss that is no scalar or requires no gradient.
        """
        divided: torch.Tensor = self.zero_engine.backward(loss, retain_graph, scale_wrt_gas)
        return divided.to(loss.dtype)

    @property
    def optimizer(self) -> Any:
        """Return the `ZeROOptimizer`; at stage 0 in float32 the torch optimizer itself. Without an optimizer return the
        `ParameterOffload` at stage 3, else None."""
        return self._named_optimizer

    @property
    def local_rank(self) -> int:
        """Return this rank's index on its host, by LOCAL_RANK; 0 without that variable."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def communication_data_type(self) -> torch.dtype:
        """Return the dtype of gradients in messages between ranks."""
        return self.zero_engine.training_state.precision.wire_dtype

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Count the micro-batch and, at the accumulation boundary, update the weights, by `Engine.step` with its
        arguments; collective then. Raises `StageError` inside `no_sync` and `coalesce_grad_reduction`, where gradients
        are not those of all ranks yet, and `NonFiniteGradientError` on every rank for a gradient that is not finite
        where no loss scale is in use."""
        self._refuse_in_block("step")
        self.zero_engine.step(*args, **kwargs)

    def train_batch(self, data_iter: Iterable[Any] | None = None, loss_fn: LossOf = loss_in) -> torch.Tensor:
        """Take one optimizer step over the next ``gradient_accumulation_steps`` micro-batches of ``data_iter``, by
        default of the training data, which begin again at their end. Return the mean of their losses over all
        data-parallel ranks, a detached scalar, as DeepSpeed's PipelineEngine does.

        ``loss_fn``: returns the loss, given the model's output and the micro-batch. Raises `StageError` where `step`
        does, and `UsageError` on every rank if one has too few micro-batches. Collective.
        """
        self._refuse_in_block("train_batch")
        return self._whole_steps.take(data_iter, loss_fn, self.seq_data_parallel_group)

    def was_step_applied(self) -> bool:
        """Return whether the last `step` updated the weights; false for one inside an accumulation. May wait for the
        device."""
        counters = self.zero_engine.training_state.counters
        return counters.accumulated == 0 and self.zero_engine.was_step_applied()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backward passes inside only accumulate gradients on this rank.

        Raises `StageError` at stages 2 and 3 and inside another such block or `coalesce_grad_reduction`, and, as
        `Engine.no_sync`, `UsageError` where every micro-batch is reduced for another reason than the stage.
        """
        if self.zero_optimization_stage() >= 2:
            raise StageError(
                f"no_sync() is for stages 0 and 1; stage {self.zero_optimization_stage()} reduces every micro-batch"
            )
        with self._without_steps("no_sync"), self.zero_engine.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context manager: the backward passes inside belong to one optimizer step, which follows the block.

        Each pass reduces its gradients as it does outside of the block; their sums are the same as if they were reduced
        once, and no rank keeps full gradients until then. Raises `UnsupportedError` at stage 0, and `StageError` inside
        another such block or `no_sync`.
        """
        if self.zero_optimization_stage() == 0:
            raise UnsupportedError("coalesce_grad_reduction is for stages 1 to 3; at stage 0 use no_sync()")
        with self._without_steps("coalesce_grad_reduction"):
            yield

    def _refuse_in_block(self, call: str) -> None:
        """Raise `StageError` inside a block of `no_sync` or `coalesce_grad_reduction`. ``call``: the refused method's
        name, for the message."""
        if self.inside_no_sync_ctxt:
            raise StageError(f"{call}() inside no_sync() or coalesce_grad_reduction(): leave the block first")

    @contextmanager
    def _without_steps(self, block: str) -> Iterator[None]:
        """Context manager inside which `step`, `train_batch` and another such block raise `StageError`. ``block``: the
        name of the method that opens it, for the message."""
        if self.inside_no_sync_ctxt:
            raise StageError(f"{block}() inside no_sync() or coalesce_grad_reduction(): such blocks cannot be nested")
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm, before clipping, of the last step that was not skipped.

        0 if all steps were skipped; None before the first step.
        """
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
        """Write the full weights with torch.save to ``save_dir/save_filename``, and return whether that was done.
        Collective.

        At stage 3 it does nothing and returns False, with a warning, unless the configuration sets
        `stage3_gather_16bit_weights_on_model_save`. ``exclude_frozen_parameters``: leave frozen ones out.
        """
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
        """Write the full training state to ``save_dir/tag`` (default ``global_step{N}``), atomically, and return True.
        Collective.

        ``client_state``: what `load_checkpoint` is to return, together with the ``ds_version`` that wrote it; it may
        hold tensors, tuples and keys that are no strings. ``save_latest``: make this checkpoint the one that loading
        takes by default. ``exclude_frozen_parameters``: leave frozen ones out. The folder also gets small files with
        DeepSpeed's names (see `state_files`).

        If ranks pass different folders or tags, those of the first rank count, with a warning on the others. Different
        tags raise `TagError` on every rank if `checkpoint.tag_validation` is "Fail", and are not warned of if it is
        "Ignore". Raises on every rank: `zero_ckpt.CheckpointError`, inside an accumulation `UsageError`.
        """
        folder, tag = agreed_place(self.zero_engine, "save_checkpoint", save_dir, tag)
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
        """Load the checkpoint ``load_dir/tag``, also one that DeepSpeed wrote, from any number of ranks; return (path,
        client state as it was given to `save_checkpoint`). Collective.

        Without a ``tag``, the file `latest` in the folder names it, or else the file `latest_universal`, which comes
        first under `checkpoint.load_universal`. If the folder has neither file, the newest complete checkpoint is
        loaded, with a warning (DeepSpeed loads nothing then); if it has no checkpoint, ``(None, None)`` is returned,
        with a warning. If ranks pass different folders or tags, those of the first rank count, as for
        `save_checkpoint`.

        ``load_module_strict``: false loads what fits by name. ``load_module_only``: load only weights.
        ``custom_load_fn(src=tensors by name, dst=module)`` loads the weights instead of the match by name. Raises
        `zero_ckpt.CheckpointError` on every rank.
        """
        folder, tag = agreed_place(self.zero_engine, "load_checkpoint", load_dir, tag)
        if tag is None:
            found = newest(self.zero_engine, folder)
            if self.resolved_config.checkpoint.load_universal:
                tag = found.universal
            if not found.has_latest and found.universal is None:
                if not found.has_any:
                    logger.warning("no checkpoint in %s: nothing was loaded", folder)
                    return None, None
                logger.warning("no file 'latest' in %s and no tag given: the newest checkpoint there is loaded", folder)
        path, client_state = self.zero_engine.load_checkpoint(
            folder,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        self._whole_steps.restart_data()
        return path, from_plain(client_state)

    save_fp16_model = save_16bit_model

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among the data-parallel ranks, which hold the same part of the model; ranks that
        share a sequence have the same index.
        """
        return self.zero_engine.training_state.sample_rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that share a layer; 0 without an ``mpu``."""
        return int(self.model_part.place.rank)

    get_tensor_parallel_rank = get_model_parallel_rank

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share this rank's sequences; None where none are shared."""
        return self.mpu.get_sequence_parallel_group() if self.sequence_parallel_size > 1 else None

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks over which states are sharded: all ranks without an ``mpu``, else the ranks of
        the mpu's data-parallel group or, where ranks share sequences, of its sequence-data-parallel group.
        """
        if self.mpu is None:
            return get_world_group()
        axis = "sequence_data" if self.sequence_parallel_size > 1 else "data"
        group: dist.ProcessGroup | None = getattr(self.mpu, f"get_{axis}_parallel_group")()
        return group

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share this rank's sequences, `seq_parallel_group`; None where none are
        shared."""
        return self.seq_parallel_group

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        """Return whether ``obj`` has a length and items by index."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        """Return whether ``obj`` is a `torch.utils.data.IterableDataset`."""
        return isinstance(obj, IterableDataset)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples per step over all ranks, samples per micro-batch and rank, micro-batches per step)."""
        sizes = self.zero_engine.training_state.sizes
        return sizes.train, sizes.micro, sizes.steps

    def get_mom(self) -> list[Any]:
        """Return the ``momentum``, else the ``betas``, of each param group; 0.0 for a group with neither.
        Raises `UsageError` without an optimizer."""
        groups = self.zero_engine.training_state.check_trainable("get_mom").param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """Return the value of the key ``type`` of each param group of the optimizer; 0.0 for a group without that key.
        Raises `UsageError` without an optimizer."""
        groups = self.zero_engine.training_state.check_trainable("get_type").param_groups
        return [group.get("type", 0.0) for group in groups]

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic; False without an optimizer."""
        return self.sharded_optimizer is not None and isinstance(self.sharded_optimizer.loss_scale, DynamicLossScale)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return (dtype of the parameters, dtype in which gradients are accumulated)."""
        precision = self.zero_engine.training_state.precision
        return precision.param_dtype, precision.accumulate_dtype

    def empty_partition_cache(self) -> None:
        """Free the accelerator memory that torch caches; do nothing on the CPU.
        Parameters are released after each pass anyway."""
        self.zero_engine.training_state.check_open("empty_partition_cache")
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def destroy(self, unshard: bool = True) -> None:
        """Close the engine: unshard its parameters, which become plain `nn.Parameter`s again, remove all hooks and
        leave the process groups. Collective.

        ``unshard``: false leaves sharded parameters released, for models that do not fit on one rank. Raises
        `zero_ckpt.CheckpointError` if a checkpoint that was written in the background failed.
        """
        self.zero_engine.destroy(unshard)
        remove_names(self.module.parameters())

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name``, which the class does not define: for a name in `GETTERS` a method that returns
        a value of the configuration, for one in `REFUSED` a function that raises `UnsupportedError`, else the model's
        attribute. Raises AttributeError if the model has none."""
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
