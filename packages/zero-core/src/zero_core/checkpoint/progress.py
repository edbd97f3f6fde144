"""The training state besides tensors: counters, hyperparameters, schedule, loss scale, data position."""

from __future__ import annotations

import logging
from typing import Any

import torch

from zero_ckpt import Checkpoint, MismatchError
from zero_ckpt.torch import RngState

from ..state import TrainingState
from .scheduler_state import load_plain_state, plain_state

logger = logging.getLogger("zero_core")

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


def progress_of(state: TrainingState, client_state: dict[str, Any]) -> dict[str, Any]:
    """Return the training state besides tensors as plain data by name; the user's ``client_state`` is under
    "client"."""
    return {
        "client": client_state,
        "counters": {name: getattr(state.counters, name) for name in _COUNTERS},
        "scheduler": None if state.attached.scheduler is None else plain_state(state.attached.scheduler),
        "loss_scale": None if state.optimizer is None else state.optimizer.loss_scale.state_dict(),
        "param_groups": _hyperparameters(state),
        "virtual_ranks": state.micro_batches.state_dict(),
        "data": None if state.attached.loader is None else state.attached.loader.state_dict(),
    }


def engine_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `progress_of` returned when the checkpoint was saved; for one of another program, defaults."""
    state = checkpoint.client_state if isinstance(checkpoint.client_state, dict) else {}
    empty = dict.fromkeys(("scheduler", "loss_scale", "param_groups", "data"))
    if "counters" in state:
        return {**empty, "client": {}, **state}
    return {**empty, "counters": {"global_steps": checkpoint.step}, "client": state}


def load_counters(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Load the counters, the seed of virtual ranks and, if the world size is the same, random generators' states."""
    for name, value in engine_state(checkpoint)["counters"].items():
        setattr(state.counters, name, value)
    state.partition.runtime.step = state.counters.global_steps
    state.micro_batches.load_state_dict(engine_state(checkpoint).get("virtual_ranks"))
    ranks = checkpoint.rank_state
    own = ranks[state.partition.data_rank] if len(ranks) == state.partition.data_world_size else None
    if isinstance(own, dict) and "random" in own:
        RngState().load_state_dict(own["random"])


def check_virtual_ranks(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Raise `MismatchError` if this run has virtual ranks and cannot continue bitwise from the checkpoint."""
    problem = state.micro_batches.mismatch(engine_state(checkpoint).get("virtual_ranks"))
    if problem is not None:
        raise MismatchError(
            f"{checkpoint.path} cannot resume bitwise under deterministic.across_world_sizes: {problem}. Configure "
            "this run alike (OMP_NUM_THREADS sets the threads), or load with load_module_only=True"
        )


def load_schedule(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Load the learning-rate schedule, if both the engine and the checkpoint have one."""
    saved = engine_state(checkpoint)["scheduler"]
    if state.attached.scheduler is not None and saved is not None:
        load_plain_state(state.attached.scheduler, saved)


def load_hyperparameters(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Load the options of param groups and the loss scale, where checkpoint and engine have them. Raises
    `MismatchError` for another number of groups."""
    sharded, saved = state.optimizer, engine_state(checkpoint)
    if sharded is None:
        return
    if saved["loss_scale"] is not None:
        sharded.loss_scale.load_state_dict(saved["loss_scale"])
    stored, groups = saved["param_groups"], sharded.param_groups
    if stored is None:
        return
    if len(stored) != len(groups):
        raise MismatchError(
            f"{checkpoint.path} has {len(stored)} param groups, the optimizer has {len(groups)}; "
            + (saved.get("advice") or "build the optimizer as it was, or pass load_optimizer_states=False")
        )
    for group, values in zip(groups, stored, strict=True):
        for key, value in values.items():
            group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key), tuple) else value


def load_position(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Load the data loader's position, if there is a loader. Warn on rank 0 if the checkpoint has no position."""
    loader, position = state.attached.loader, engine_state(checkpoint)["data"]
    if loader is None:
        return
    if position is not None:
        loader.load_state_dict(position)
    elif state.partition.data_rank == 0:
        logger.warning(
            "%s holds no position in the training data: the loader starts at the beginning of an epoch", checkpoint.path
        )


def _hyperparameters(state: TrainingState) -> list[dict[str, Any]]:
    """Return the options of each param group as plain data; an empty list without an optimizer."""
    if state.optimizer is None:
        return []
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in state.optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return ``value`` with tensors as numbers or lists, at any depth of its containers, which are copied."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
