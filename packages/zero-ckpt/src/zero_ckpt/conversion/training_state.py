"""The training state besides tensors that a checkpoint of DeepSpeed holds: counters, schedule, loss scale, options."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedError
from ..filing import read_at
from .deepspeed import OWN_KEYS, ModelFile, open_models, optimizer_files
from .torch_file import StandIn, load_structure

_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
IMPLEMENTATION = frozenset({"params", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"})
"""Keys of a param group that say how the optimizer computes, which is the run's own business."""
_NOT_THE_USERS = (OWN_KEYS | {"lr_scheduler", "ds_autoep_layers"}) - {"ds_version"}


def read_training_state(directory: Path) -> tuple[dict[str, Any], int]:
    """Return what a tag directory of DeepSpeed, universal or not, holds besides the tensors of model and optimizer, and
    the number of ranks that wrote it.

    Keys: `counters` (global_steps, skipped_steps and global_samples, as far as they are there), `scheduler` (the state
    of the learning-rate schedule, or None), `loss_scale` (None, or a map of `kind`, "static" or "dynamic", `scale`,
    and if dynamic `calls`, `last_overflow` and `hysteresis_left`), `param_groups` (the options of each, None without an
    optimizer, and none at stage 0, whose file does not say which state belongs to which parameter) and
    `client` (the user's client state and `ds_version`). Tensors in it are read into CPU memory; objects stay of their
    types. Raises CheckpointError, and DamagedError for a file that is missing or damaged.
    """
    model = open_models(directory)[0]
    optimizer, file = _optimizer_state(directory)
    state = {
        "counters": {name: int(model.data[name]) for name in _COUNTERS if model.data.get(name) is not None},
        "scheduler": _loaded(model.data.get("lr_scheduler"), model.path),
        "loss_scale": _loss_scale(optimizer),
        "param_groups": _param_groups(optimizer, file) if optimizer or model.data.get("optimizer") is None else [],
        "client": _client_state(model),
    }
    return state, int(model.data.get("dp_world_size") or 1)


def _optimizer_state(directory: Path) -> tuple[Mapping[str, Any], Path]:
    """Return the first rank's optimizer state, or what a universal checkpoint has in common, and its file; an empty map
    without one."""
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
    """Return the state of the loss scale, as `read_training_state` says; None where `optimizer` has none."""
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
    """Return the hyperparameters of each param group, one-element tensors as numbers; None where there are none."""
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    groups = optimizer.get("param_groups") or (inner.get("param_groups") if isinstance(inner, Mapping) else None)
    if not groups:
        return None
    return [
        {key: _number(_loaded(value, file)) for key, value in group.items() if key not in IMPLEMENTATION}
        for group in groups
    ]


def _number(value: Any) -> Any:
    """Return a tensor of one element as a number, and anything else as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _client_state(model: ModelFile) -> dict[str, Any]:
    """Return the user's entries of a model file, and `ds_version`, which is read back with them."""
    return {key: _loaded(value, model.path) for key, value in model.data.items() if key not in _NOT_THE_USERS}


def _loaded(value: Any, file: Path) -> Any:
    """Return a value of `load_structure(file)` in which tensors hold their data, in dicts, lists, tuples and sets."""
    if isinstance(value, torch.Tensor):
        return _read_tensor(value, file)
    if isinstance(value, dict):
        filled = copy.copy(value)
        for key, item in value.items():
            filled[key] = _loaded(item, file)
        return filled
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_loaded(item, file) for item in value)
    return value


def _read_tensor(tensor: torch.Tensor, file: Path) -> torch.Tensor:
    """Return a tensor of `load_structure(file)` with its data, in CPU memory of its own. Raises DamagedError when the
    file does not hold all of it."""
    count = tensor.untyped_storage().nbytes()
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if not count or not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    if begin is None or begin + count > file.stat().st_size:
        raise DamagedError(f"{file}: a tensor of shape {tuple(tensor.shape)} reaches beyond the end of the file")
    data = bytearray(count)
    read_at(file, begin, memoryview(data), f"a tensor of shape {tuple(tensor.shape)} in {file}")
    flat = torch.frombuffer(data, dtype=tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).clone()
