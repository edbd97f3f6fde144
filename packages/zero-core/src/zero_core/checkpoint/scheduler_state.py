"""Convert the state of a learning-rate scheduler to plain data, as checkpoints hold no pickles, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero_core.errors import UsageError
from zero_optim import Scheduler


def plain_state(scheduler: Scheduler) -> dict[str, Any]:
    """Return the scheduler's state as None, bool, int, float, str, bytes, lists and maps with string keys. Maps with
    other keys become lists of pairs, tuples lists, one-element tensors numbers. Functions are left out, as the
    scheduler gets them when it is constructed. Raises `UsageError`, naming the entry, for anything else."""
    state: dict[str, Any] = _plain(scheduler.state_dict(), f"the state of {type(scheduler).__name__}")
    return state


def load_plain_state(scheduler: Scheduler, state: dict[str, Any]) -> None:
    """Load ``state``, which `plain_state` returned, into the scheduler, in the types that its present state has."""
    scheduler.load_state_dict(_like(scheduler.state_dict(), state))


def _plain(value: Any, path: str) -> Any:
    """Return ``value`` as plain data in the way of `plain_state`. ``path``: where it is in the state, for the
    `UsageError` that is raised for a value that is no plain data."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        kept = {key: _plain(item, f"{path}[{key!r}]") for key, item in value.items() if not callable(item)}
        return kept if all(isinstance(key, str) for key in kept) else [[key, item] for key, item in kept.items()]
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    raise UsageError(
        f"lr_scheduler: {path} is a {type(value).__name__}, which a checkpoint does not hold; "
        "have the schedule's state_dict() return numbers, strings, lists and maps"
    )


def _like(fresh: Any, stored: Any) -> Any:
    """Return ``stored`` with tensors, tuples and maps as in ``fresh``, a state with the types wanted, at every
    depth."""
    if isinstance(fresh, torch.Tensor):
        return torch.as_tensor(stored, dtype=fresh.dtype, device=fresh.device).reshape(fresh.shape)
    if isinstance(fresh, tuple) and isinstance(stored, list):
        return tuple(_like(list(fresh), stored))
    if isinstance(fresh, list) and isinstance(stored, list):
        return [_like(fresh[i], item) if i < len(fresh) else item for i, item in enumerate(stored)]
    if isinstance(fresh, dict) and isinstance(stored, list | dict):
        pairs = dict(stored)
        made = type(fresh)()
        made.update({key: _like(fresh.get(key), item) for key, item in pairs.items()})
        return made
    return stored
