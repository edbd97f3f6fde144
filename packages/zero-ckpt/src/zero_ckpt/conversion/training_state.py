"""The training state besides tensors that a checkpoint of DeepSpeed holds: counters, schedule, loss scale, options."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedError
from ..filing import read_at
from .deepspeed import OWN_KEYS, open_model, optimizer_files
from .torch_file import StandIn, load_structure

_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
IMPLEMENTATION = frozenset({"params", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"})
"""Keys of a param group that say how the optimizer computes, which is the run's own business."""
_MOST_LEVELS = 200
_SPARE_BYTES = 64 << 20
_STAGE_0 = (
    "DeepSpeed's stage 0 keeps the states of an optimizer by position, without names, so they are not loaded: pass "
    "load_optimizer_states=False to continue with new ones; or load it with DeepSpeed once at stage 0, convert it "
    "there (ds_to_universal.py), or train a step at stage 1 and save again"
)
NOT_THE_USERS = (OWN_KEYS | {"lr_scheduler", "ds_autoep_layers"}) - {"ds_version"}
"""Keys of a model file that are never the user's client state."""


def read_training_state(directory: Path) -> tuple[dict[str, Any], int]:
    """Return what a tag directory of DeepSpeed, universal or not, holds besides the tensors of model and optimizer, and
    the number of ranks that wrote it.

    Keys: `counters` (global_steps, skipped_steps and global_samples, as far as they are there), `scheduler` (the state
    of the learning-rate schedule, or None), `loss_scale` (None, or a map of `kind`, "static" or "dynamic", `scale`,
    and if dynamic `calls`, `last_overflow` and `hysteresis_left`), `advice` (what to do where states are not loaded),
    `param_groups` (the options of each, None without an optimizer, and none at stage 0, whose file does not say which
    state belongs to which parameter) and `client` (the user's client state and `ds_version`). Tensors in it are read
    into CPU memory; objects stay of their types. Raises CheckpointError, and DamagedError for a file that is missing or
    damaged.
    """
    model = open_model(directory)
    optimizer, file = _optimizer_state(directory)
    loader = _Loader(model.path)
    by_position = not optimizer and model.data.get("optimizer") is not None
    state = {
        "counters": {name: int(model.data[name]) for name in _COUNTERS if model.data.get(name) is not None},
        "scheduler": loader.load(model.data.get("lr_scheduler")),
        "loss_scale": _loss_scale(optimizer),
        "param_groups": [] if by_position else _param_groups(optimizer, file),
        "advice": _STAGE_0 if by_position else None,
        "client": {key: loader.load(value) for key, value in model.data.items() if key not in NOT_THE_USERS},
    }
    return state, int(model.data.get("dp_world_size") or 1)


def _optimizer_state(directory: Path) -> tuple[Mapping[str, Any], Path]:
    """Return (the optimizer state that a tag directory of DeepSpeed holds, its file): the first rank's, or the one that
    a universal checkpoint keeps for all parameters. The state is an empty map where there is none."""
    common = directory / "zero" / "optimizer_state.pt"
    if (directory / "zero").is_dir():
        found: Any = load_structure(common) if common.is_file() else {}
        return found, common
    files = optimizer_files(directory)
    if not files:
        return {}, directory
    state: Mapping[str, Any] = load_structure(files[0])["optimizer_state_dict"]
    return state, files[0]


def _loss_scale(optimizer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the loss scale in `optimizer`, an optimizer state of DeepSpeed, in the form of
    `read_training_state`; None where it has none."""
    scaler = optimizer.get("loss_scaler")
    if not isinstance(scaler, StandIn):
        return None
    values = scaler.attributes
    if not values.get("dynamic"):
        return {"kind": "static", "scale": float(values["cur_scale"])}
    return {
        "kind": "dynamic",
        "scale": float(values["cur_scale"]),
        "calls": int(values["cur_iter"]),
        "last_overflow": int(values["last_overflow_iter"]),
        "hysteresis_left": int(values["cur_hysteresis"]),
    }


def _param_groups(optimizer: Mapping[str, Any], file: Path) -> list[dict[str, Any]] | None:
    """Return the hyperparameters of each param group in `optimizer`, an optimizer state of DeepSpeed that `file` holds;
    one-element tensors become numbers. None where there are none."""
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    groups = optimizer.get("param_groups") or (inner.get("param_groups") if isinstance(inner, Mapping) else None)
    if not groups:
        return None
    loader = _Loader(file)
    return [
        {key: _number(loader.load(value)) for key, value in group.items() if key not in IMPLEMENTATION}
        for group in groups
    ]


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element; anything else is returned as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


class _Loader:
    """Loads the data of the tensors in values that `load_structure` returned for `file`.

    A pickle can name one value many times, and one storage under many shapes. So values that are met again are the same
    objects in the result, and all tensors together may not be much larger than the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._nbytes = file.stat().st_size
        self._left = self._nbytes + _SPARE_BYTES
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # an id may be used again once its object is gone

    def load(self, value: Any, depth: int = 0) -> Any:
        """Return `value` with data in its tensors, also in those inside dicts, lists, tuples and sets. `depth`: how
        many of these are around it.

        Raises DamagedError for what is nested too deeply, or larger than the file.
        """
        if not isinstance(value, (torch.Tensor, dict, list, tuple, set, frozenset)):
            return value
        if id(value) not in self._done:
            if depth > _MOST_LEVELS:
                raise DamagedError(f"{self._file}: values nested in more than {_MOST_LEVELS} levels")
            self._done[id(value)] = self._new(value, depth + 1)
            self._kept.append(value)
        return self._done[id(value)]

    def _new(self, value: Any, depth: int) -> Any:
        """Return a tensor with its data, or a copy of a container whose values are loaded; any other value as it is.
        ``depth``: the number of containers around the values inside."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            filled = copy.copy(value)
            for key, item in value.items():
                filled[key] = self.load(item, depth)
            return filled
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.load(item, depth) for item in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with its data, in CPU memory of its own. Raises DamagedError when the data lie beyond the end
        of the file, or all tensors so far are larger than the file."""
        text = f"{self._file}: a tensor of shape {tuple(tensor.shape)}"
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        size, first = tensor.element_size(), int(tensor.storage_offset())
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin is None or begin + (first + span) * size > self._nbytes:
            raise DamagedError(f"{text} reaches beyond the end of the file")
        self._left -= (span + tensor.numel()) * size // 2
        if self._left < 0:
            raise DamagedError(
                f"{text} and strides {tensor.stride()} is, with those before it, larger than the file holds"
            )
        data = bytearray(span * size)
        read_at(self._file, begin + first * size, memoryview(data), f"{text}, reading")
        flat = torch.frombuffer(data, dtype=tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride()).clone()
