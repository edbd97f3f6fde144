"""Write a DeepSpeed universal checkpoint, one trained tensor in memory at a time; frozen ones are one file.

`zero/<name>/` holds `fp32.pt` and one file per optimizer state; `zero/optimizer_state.pt` and the model state file hold
what DeepSpeed keeps once. The same directory loads at stages 1, 2 and 3.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..commit import fsync_directory, remove_directory, staging_path, write_durably
from ..errors import CheckpointError
from ..types import is_optimizer_kind, numel, state_key
from .dtypes import output_dtype
from .model import ModelTensor
from .pytorch_sink import read_model_tensor
from .sources import Progress, Source

_WRITTEN_FOR = "0.19.8"
# how an optimizer computes, which is the target run's own business
_IMPLEMENTATION = frozenset({"params", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"})


def write_universal(source: Source, root: Path, *, progress: Progress) -> Path:
    """Write `<root>/global_step<step>` and `<root>/latest_universal`; returns the directory.

    Hyperparameters come from `param_groups` in the source's client state, or from an optimizer that `zero_ckpt.save`
    stored; without either the target run's own configuration stays in force. Raises CheckpointError when the source
    holds no optimizer state.
    """
    tag = f"global_step{source.step}"
    staging = staging_path(root, tag, os.urandom(6).hex())
    names = _trainable(source)
    try:
        for name in names:
            _write_parameter(source, name, staging / "zero" / _folder(name), progress)
        _save(_optimizer_state(source, names), staging / "zero" / "optimizer_state.pt")
        model = _model_state(source, names, progress)
        for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            _save(model, staging / file)
        if (root / tag).exists():
            remove_directory(root / tag)
        staging.rename(root / tag)
    except BaseException:
        if staging.exists():
            remove_directory(staging)
        raise
    write_durably(root / "latest_universal", tag.encode())
    fsync_directory(root)
    return root / tag


def _trainable(source: Source) -> list[str]:
    """Parameters with optimizer state, in the source's order."""
    stateful = {name for name, kind in source.tensors if is_optimizer_kind(kind)}
    names = list(dict.fromkeys(name for name, kind in source.tensors if kind in ("param", "master")))
    found = [name for name in names if name in stateful]
    if not found:
        raise CheckpointError("the source holds no optimizer state, which a universal checkpoint is made of")
    return found


def _folder(name: str) -> str:
    """The directory of a parameter is its name, so that must be one path component."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise CheckpointError(f"{name!r} cannot be a directory of a universal checkpoint")
    return name


def _write_parameter(source: Source, name: str, folder: Path, progress: Progress) -> None:
    kind = "master" if (name, "master") in source.tensors else "param"
    _save({"param": _read(source, name, kind, "F32", progress), "cat_dim": 0}, folder / "fp32.pt")
    shape = source.tensors[name, kind].shape
    for other in _state_kinds(source, name):
        tensor = source.tensors[name, other]
        value = _read(source, name, other, None, progress)
        if state_key(other) == "step":
            _save(_step(value), folder / "step.pt")
        elif tuple(tensor.shape) == tuple(shape):
            _save({"param": value, "cat_dim": 0}, folder / f"{other}.pt")
        else:
            raise CheckpointError(
                f"{name!r}: state {other!r} of shape {tuple(tensor.shape)} is not elementwise, so DeepSpeed cannot "
                "partition it"
            )


def _state_kinds(source: Source, name: str) -> Iterator[str]:
    return (kind for owner, kind in source.tensors if owner == name and is_optimizer_kind(kind))


def _read(source: Source, name: str, kind: str, dtype: str | None, progress: Progress) -> torch.Tensor:
    tensor = source.tensors[name, kind]
    wanted = output_dtype(tensor.dtype, dtype)
    value: torch.Tensor = read_model_tensor(
        source, ModelTensor(name, kind, tuple(tensor.shape), tensor.dtype, wanted), progress
    )
    return value


def _step(value: torch.Tensor) -> Any:
    """A number for optimizers that count in Python, a tensor for those that keep one, as the source had it."""
    return value if value.is_floating_point() else int(value)


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _groups(source: Source, count: int) -> list[dict[str, Any]]:
    """Hyperparameters per group; empty maps change nothing when DeepSpeed applies them."""
    client = source.client_state if isinstance(source.client_state, dict) else {}
    for value in (client, *client.values()):
        if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
            return [_plain_options(group) for group in value["param_groups"]]
        if isinstance(value, dict) and isinstance(value.get("$optimizer"), dict):
            return [_plain_options(group["options"]) for group in value["$optimizer"]["groups"]]
    return [{} for _ in range(count)]


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in options.items():
        if key in _IMPLEMENTATION:
            continue
        if isinstance(value, dict):
            found[key] = tuple(value["$tuple"]) if "$tuple" in value else value.get("$scalar", value)
        else:
            found[key] = tuple(value) if isinstance(value, list) else value
    return found


def _optimizer_state(source: Source, names: list[str]) -> dict[str, Any]:
    groups = _groups(source, len(names))
    common = {
        key: value for key, value in groups[0].items() if all(key in group and group[key] == value for group in groups)
    }
    step: Any = torch.tensor(float(source.step))
    for kind in _state_kinds(source, names[0]):
        if state_key(kind) == "step":
            step = _step(_read(source, names[0], kind, None, lambda nbytes: None))
    return {
        "ds_version": _WRITTEN_FOR,
        "param_groups": groups,
        # stage 3 applies one group to all, so only what they have in common is given
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [common]},
    }


def _model_state(source: Source, names: list[str], progress: Progress) -> dict[str, Any]:
    trained = set(names)
    client = source.client_state if isinstance(source.client_state, dict) else {}
    module: dict[str, torch.Tensor] = OrderedDict()
    frozen: dict[str, torch.Size] = OrderedDict()
    for (name, kind), tensor in source.tensors.items():
        if kind == "buffer" or (kind == "param" and name not in trained):
            module[name] = _read(source, name, kind, None, progress)
            if kind == "param":
                frozen[name] = torch.Size(tensor.shape)
    shapes = OrderedDict((name, torch.Size(_shape(source, name))) for name in names)
    return {
        **{str(key): value for key, value in client.items() if not _is_ours(value)},
        "lr_scheduler": _schedule(source, client),
        "module": module,
        "buffer_names": [name for name, kind in source.tensors if kind == "buffer"],
        "param_shapes": [shapes],
        "frozen_param_shapes": frozen,
        "frozen_param_fragments": {name: module[name] for name in frozen},
        "shared_params": dict(source.aliases),
        "optimizer": None,
        "skipped_steps": 0,
        "global_steps": source.step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _WRITTEN_FOR,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def _schedule(source: Source, client: dict[str, Any]) -> dict[str, Any]:
    """The state of a learning rate schedule; without one, where a schedule that began with training stands.

    DeepSpeed's schedules read `last_batch_iteration`, counted from 0, and torch's `last_epoch`, counted from 1.
    """
    for key in ("lr_scheduler", "scheduler"):
        state = client.get(key)
        if isinstance(state, dict) and state and not _is_ours(state):
            return state
    return {"last_batch_iteration": source.step - 1, "last_epoch": source.step}


def _is_ours(value: Any) -> bool:
    return isinstance(value, dict) and any(key.startswith("$") for key in value)


def _shape(source: Source, name: str) -> tuple[int, ...]:
    kind = "master" if (name, "master") in source.tensors else "param"
    shape = tuple(source.tensors[name, kind].shape)
    if numel(shape) == 0:
        raise CheckpointError(f"{name!r} is empty, which DeepSpeed cannot partition")
    return shape
