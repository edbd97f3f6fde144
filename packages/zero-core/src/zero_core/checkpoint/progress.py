"""Where training stands besides its tensors: counters, hyperparameters, schedule, loss scale, data position."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from zero_ckpt import Checkpoint, MismatchError
from zero_ckpt.torch import RngState

from ..schedules import load_plain_state, plain_state

if TYPE_CHECKING:
    from ..engine import Engine

logger = logging.getLogger("zero_core")

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


def progress_of(engine: Engine, client_state: dict[str, Any]) -> dict[str, Any]:
    """What goes into a checkpoint's client state; ``client_state`` is the user's."""
    return {
        "client": client_state,
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "scheduler": None if engine.lr_scheduler is None else plain_state(engine.lr_scheduler),
        "loss_scale": None if engine.sharded_optimizer is None else engine.sharded_optimizer.loss_scale.state_dict(),
        "param_groups": _hyperparameters(engine),
        "virtual_ranks": engine.micro_batches.state_dict(),
        "data": None if engine.training_dataloader is None else engine.training_dataloader.state_dict(),
    }


def engine_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What an engine saved besides tensors; defaults where something else wrote the checkpoint."""
    state = checkpoint.client_state
    if isinstance(state, dict) and "counters" in state:
        return state
    counters = {"global_steps": checkpoint.step}
    empty = dict.fromkeys(("scheduler", "loss_scale", "param_groups", "data"))
    return {**empty, "counters": counters, "client": state if isinstance(state, dict) else {}}


def load_counters(engine: Engine, checkpoint: Checkpoint) -> None:
    """Counters, and at the same world size the generators of this rank."""
    for name, value in engine_state(checkpoint)["counters"].items():
        setattr(engine, name, value)
    engine.partition.runtime.step = engine.global_steps
    engine.micro_batches.load_state_dict(engine_state(checkpoint).get("virtual_ranks"))
    ranks = checkpoint.rank_state
    own = ranks[engine.partition.data_rank] if len(ranks) == engine.partition.data_world_size else None
    if isinstance(own, dict) and "random" in own:
        RngState().load_state_dict(own["random"])


def check_virtual_ranks(engine: Engine, checkpoint: Checkpoint) -> None:
    """Raise MismatchError where the run would not go on with the bits of the one that was saved."""
    problem = engine.micro_batches.mismatch(engine_state(checkpoint).get("virtual_ranks"))
    if problem is not None:
        raise MismatchError(
            f"{checkpoint.path} cannot go on bitwise under deterministic.across_world_sizes: {problem}. Configure this "
            "run alike (OMP_NUM_THREADS sets the threads), or load with load_module_only=True"
        )


def load_schedule(engine: Engine, checkpoint: Checkpoint) -> None:
    """The learning rate schedule, where there is one on both sides."""
    state = engine_state(checkpoint)["scheduler"]
    if engine.lr_scheduler is not None and state is not None:
        load_plain_state(engine.lr_scheduler, state)


def load_hyperparameters(engine: Engine, checkpoint: Checkpoint) -> None:
    """Param groups and the loss scale; raises MismatchError for another number of groups."""
    sharded, state = engine.sharded_optimizer, engine_state(checkpoint)
    if sharded is None:
        return
    if state["loss_scale"] is not None:
        sharded.loss_scale.load_state_dict(state["loss_scale"])
    stored, groups = state["param_groups"], sharded.param_groups
    if stored is None:
        return
    if len(stored) != len(groups):
        raise MismatchError(
            f"{checkpoint.path} has {len(stored)} param groups, the optimizer has {len(groups)}; "
            "build the optimizer as it was, or pass load_optimizer_states=False"
        )
    for group, values in zip(groups, stored, strict=True):
        for key, value in values.items():
            group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key), tuple) else value


def load_position(engine: Engine, checkpoint: Checkpoint) -> None:
    """The loader goes on with the batch that would have followed, or says that it cannot."""
    loader, position = engine.training_dataloader, engine_state(checkpoint)["data"]
    if loader is None:
        return
    if position is not None:
        loader.load_state_dict(position)
    elif engine.partition.data_rank == 0:
        logger.warning(
            "%s holds no position in the training data: the loader starts at the beginning of an epoch", checkpoint.path
        )


def _hyperparameters(engine: Engine) -> list[dict[str, Any]]:
    if engine.sharded_optimizer is None:
        return []
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in engine.sharded_optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Numbers that are tensors become numbers; containers are copied. What else is not plain data is refused by the
    checkpoint, which names its path."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
