"""DeepSpeed universal checkpoints as a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedError
from .deepspeed import ModelFile, Tensors
from .segments import SegmentSource
from .torch_file import load_structure, scalar, stored


def open_universal(directory: Path) -> SegmentSource:
    """Open one tag directory of a universal checkpoint: `zero/<name>/fp32.pt`, `exp_avg.pt`, … and a model file."""
    paths = sorted(directory.glob("*mp_rank_00_model_states.pt"))
    if not paths:
        raise DamagedError(f"{directory} has no mp_rank_00_model_states.pt")
    model = ModelFile(paths[0])
    aliases = model.aliases()
    shapes = {name: shape for group in model.shapes() for name, shape in group.items()}
    shapes.update({name: tuple(shape) for name, shape in (model.data.get("frozen_param_shapes") or {}).items()})
    tensors: Tensors = {}
    for name, tensor in model.module.items():
        if name not in aliases and (tensor.numel() or name in model.buffers):
            shapes.setdefault(name, tuple(tensor.shape))
            tensors[name, "buffer" if name in model.buffers else "param"] = stored(tensor, model.path).whole()
    for folder in sorted(path for path in (directory / "zero").iterdir() if path.is_dir()):
        if folder.name not in model.buffers and folder.name not in aliases:
            _add(tensors, folder, shapes.get(folder.name), model.module.get(folder.name))
    _add_common_step(tensors, directory / "zero" / "optimizer_state.pt")
    known = {name for name, _ in tensors}
    kept = {alias: name for alias, name in aliases.items() if name in known}
    return SegmentSource(tensors, kept, model.step(), model.client_state())


def _add_common_step(tensors: Tensors, file: Path) -> None:
    """Stage 3 keeps one step for all, in the common file."""
    common = load_structure(file) if file.is_file() else {}
    state = common.get("optimizer_state_dict", {}).get("state", {}).get(0, {}) if isinstance(common, Mapping) else {}
    for name, kind in list(tensors):
        if kind == "exp_avg" and "step" in state and (name, "step") not in tensors:
            tensors[name, "step"] = scalar(state["step"], file)


def _add(tensors: Tensors, folder: Path, shape: tuple[int, ...] | None, used: torch.Tensor | None) -> None:
    for file in sorted(folder.glob("*.pt")):
        value: Any = load_structure(file)
        if file.stem == "step":
            tensors[folder.name, "step"] = scalar(value, file)
            continue
        tensor = value.get("param") if isinstance(value, Mapping) else value
        if not isinstance(tensor, torch.Tensor):
            raise DamagedError(f"{file} holds no tensor")
        kind = file.stem
        if kind == "fp32":
            kind = "param" if used is None or used.dtype == torch.float32 else "master"
        tensors[folder.name, kind] = stored(tensor, file).whole(shape)
