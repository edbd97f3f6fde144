"""Checkpoints in DeepSpeed's own format, from which DeepSpeed resumes (`"checkpoint": {"format": "deepspeed"}`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_ckpt import Checkpoint, CheckpointError, Coordinator, Interval
from zero_ckpt.conversion.deepspeed_pickle import ConstantScaler, DeepSpeedObject, DynamicScaler
from zero_ckpt.conversion.deepspeed_sink import DeepSpeedForm
from zero_ckpt.conversion.training_state import NOT_THE_USERS
from zero_ckpt.deepspeed_saving import save_deepspeed
from zero_core.checkpoint.names import frozen_names, named_parameters
from zero_core.errors import UsageError
from zero_core.state import TrainingState
from zero_optim import MuonWithAdam
from zero_partition import ShardedOptimizer
from zero_partition.adapters import plain_buffers
from zero_precision import DynamicLossScale

from . import VERSION
from .client_state import from_plain

_SUB_GROUP_NUMEL = 10**9
"""DeepSpeed's default of `sub_group_size`."""
_NOT_SAVED = ("params", "step")
_COMPUTING = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


class DeepSpeedWriter:
    """Writes an engine's checkpoints as DeepSpeed of version `VERSION` does; called as `zero_ckpt.save_sharded` is.

    Of the arguments of `zero_ckpt.save_sharded` it uses those that `__call__` names; others, such as a store or the
    number of threads, have no effect. ``state``: of the engine, read at each call: its module, optimizer, scheduler,
    counters and configuration. ``config``: the configuration as the user gave it, which the files repeat.

    Raises `UsageError` without an optimizer, for Muon, which consists of two, and for a model of which each rank has
    another part (tensor parallelism).
    """

    def __init__(self, state: TrainingState, config: dict[str, Any]) -> None:
        self._state, self._config = state, config
        self._optimizer = _writable_optimizer(state)

    def __call__(
        self,
        root: Path,
        tag: str,
        intervals: Iterable[Interval],
        *,
        coordinator: Coordinator,
        save_latest: bool,
        client_state: dict[str, Any],
        **others: Any,
    ) -> Path:
        """Write the tensors of ``intervals`` to the checkpoint ``root/tag`` and return its path. Collective.

        ``intervals``: the parts of tensors that this rank holds. ``coordinator``: of the ranks that save.
        ``save_latest``: make the checkpoint the one that loading takes by default. ``client_state``: the training state
        besides tensors, of which only the user's own part, "client", is written. ``others`` must have ``step``,
        ``aliases`` and ``frozen``, as for `zero_ckpt.save_sharded`. Raises `zero_ckpt.CheckpointError` on every rank,
        also for keys of the client state that DeepSpeed's files have for entries of their own.
        """
        kept = {key: others[key] for key in ("step", "aliases", "frozen")}
        user = from_plain(client_state["client"])

        def checked() -> Iterator[Interval]:
            """Yield ``intervals``, after raising `CheckpointError` for a client state that has keys of DeepSpeed's own;
            `save_deepspeed` passes what this raises on to all ranks.
            """
            _require_the_users_own(user)
            yield from intervals

        def form(checkpoint: Checkpoint) -> DeepSpeedForm:
            """Return what the files hold besides tensors; `save_deepspeed` calls it with the checkpoint, which has no
            effect."""
            return self._file_contents(user)

        return save_deepspeed(
            root, tag, checked(), form, coordinator=coordinator, save_latest=save_latest, client_state=None, **kept
        )

    def _file_contents(self, user: Mapping[str, Any]) -> DeepSpeedForm:
        """Return what DeepSpeed's files hold besides tensors: the parameters' names and options by param group, the
        counters, the loss scale, and ``user``, the user's client state.
        """
        state, zero = self._state, self._state.config.zero_optimization
        frozen = set(frozen_names(named_parameters(state.module)))
        given = "sub_group_size" in zero.model_fields_set
        persistent = {name for name, _ in plain_buffers(state.module)}
        scheduler, counters = state.attached.scheduler, state.counters
        dynamic = isinstance(self._optimizer.loss_scale, DynamicLossScale)
        optimizer: dict[str, Any] = {
            "dynamic_loss_scale": dynamic,
            "overflow": counters.last is not None and counters.last.skipped,
        }
        if zero.stage < 3:
            optimizer |= {"clip_grad": self._optimizer.clip, "ds_version": VERSION}
        return DeepSpeedForm(
            stage=zero.stage,
            groups=[[name for name in names if name not in frozen] for names in self._optimizer.group_names],
            options=[self._group_options(group) for group in self._optimizer.param_groups],
            bf16=state.config.bf16.enabled,
            sub_group_numel=zero.sub_group_size if given else _SUB_GROUP_NUMEL,
            round_robin=zero.round_robin_gradients,
            aligned=zero.parameter_alignment,
            left_out=frozenset(name for name, _ in state.module.named_buffers() if name not in persistent),
            scaler=_pickled_scaler(state, self._optimizer),
            optimizer=optimizer,
            model={
                "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
                "data_sampler": None,
                "random_ltd": None,
                "skipped_steps": counters.skipped_steps,
                "global_steps": counters.global_steps,
                "global_samples": counters.global_samples,
                "mp_world_size": 1,
                "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
                **user,
            },
            beside={"ds_config": self._config, "ds_version": VERSION},
        )

    def _group_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a param group as DeepSpeed's files hold them, with ``bias_correction`` for an Adam.

        Options of how torch computes, such as ``foreach``, are as the configuration's optimizer section says, else
        torch's defaults, since DeepSpeed takes all options of a group from the file.
        """
        section = self._config.get("optimizer")
        asked = section.get("params") if isinstance(section, dict) else None
        kept = {key: value for key, value in group.items() if key not in _NOT_SAVED}
        computing = {key: value for key, value in _COMPUTING.items() if key in kept}
        computing |= {key: asked[key] for key in computing if isinstance(asked, dict) and key in asked}
        return {**({"bias_correction": True} if "betas" in kept else {}), **kept, **computing}


def _require_the_users_own(client_state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the user's client state has a key that DeepSpeed's files use for an entry of their
    own."""
    taken = sorted(key for key in client_state if key in NOT_THE_USERS)
    if taken:
        raise CheckpointError(
            f"client state: DeepSpeed's files have {', '.join(map(repr, taken))} for entries of their own, which it "
            'would overwrite; give it other keys, or set checkpoint.format to "native"'
        )


def _writable_optimizer(state: TrainingState) -> ShardedOptimizer:
    """Return the engine's optimizer. Raises `UsageError` where DeepSpeed's format cannot hold its states: without an
    optimizer, for Muon, and where an mpu's ranks have different parts of the model."""
    wrong = ""
    if state.optimizer is None:
        wrong = "there is no optimizer, whose states it consists of"
    elif state.model_part.place.size > 1:
        wrong = "the mpu's ranks have different parts of the model"
    elif isinstance(state.optimizer.inner, MuonWithAdam):
        wrong = "Muon and AdamW have states of two optimizers"
    if wrong or state.optimizer is None:
        raise UsageError(f'checkpoint.format "deepspeed": {wrong}; set it to "native"')
    return state.optimizer


def _pickled_scaler(state: TrainingState, optimizer: ShardedOptimizer) -> DeepSpeedObject:
    """Return the optimizer's loss scale as the object that DeepSpeed pickles: a dynamic scaler with its counters, or
    one of a constant. ``state``: has the configuration of the dynamic one."""
    held, fp16 = optimizer.loss_scale.state_dict(), state.config.fp16
    if held["kind"] != "dynamic":
        return ConstantScaler(cur_scale=optimizer.loss_scale.scale, dynamic=False)
    return DynamicScaler(
        cur_scale=held["scale"],
        dynamic=True,
        cur_iter=held["calls"],
        last_overflow_iter=held["last_overflow"],
        scale_factor=2.0,
        scale_window=fp16.loss_scale_window,
        min_scale=fp16.min_loss_scale,
        delayed_shift=fp16.hysteresis,
        cur_hysteresis=held["hysteresis_left"],
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        raise_error_at_min_scale=True,
        dtype=state.precision.param_dtype,
    )
