"""DeepSpeed universal checkpoints as a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedError
from ..types import state_kind
from .deepspeed import Tensors, add_frozen, assemble, model_tensors, open_models, param_groups
from .segments import SegmentSource
from .torch_file import load_structure, scalar, stored


def open_universal(directory: Path) -> SegmentSource:
    """Open one tag directory of a universal checkpoint: `zero/<name>/fp32.pt`, `exp_avg.pt`, … and a model file.

    `fp32.pt` is the `param` where the model uses fp32 or does not hold the parameter, otherwise its `master`. Raises
    CheckpointError for a file that is not read, DamagedError when one is missing or damaged.
    """
    models = open_models(directory)
    model = models[0]
    tensors = model_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.module.items()}
    shapes.update({name: shape for group in model.shapes() for name, shape in group.items()})
    elsewhere = {*model.buffers, *model.aliases(), *(model.data.get("frozen_param_shapes") or {})}
    for folder in sorted(path for path in (directory / "zero").iterdir() if path.is_dir()):
        if folder.name not in elsewhere:
            _add_parameter(tensors, folder, shapes.get(folder.name), model.module.get(folder.name))
    add_frozen(tensors, models)
    file = directory / "zero" / "optimizer_state.pt"
    common = load_structure(file) if file.is_file() else {}
    if not isinstance(common, Mapping):
        raise DamagedError(f"{file} holds no map")
    _add_common_step(tensors, common, file)
    return assemble(tensors, model, {**model.client_state(), **param_groups(common)})


def _add_common_step(tensors: Tensors, common: Mapping[str, Any], file: Path) -> None:
    """Add the step that stage 3 keeps once for all parameters to `tensors`, for every parameter with `exp_avg` and no
    `step`. `common` is the content of `file`, which holds it."""
    state = common.get("optimizer_state_dict", {}).get("state", {}).get(0, {})
    for name, kind in list(tensors):
        if kind == "exp_avg" and "step" in state and (name, "step") not in tensors:
            tensors[name, "step"] = scalar(state["step"], file)


def _add_parameter(tensors: Tensors, folder: Path, shape: tuple[int, ...] | None, used: torch.Tensor | None) -> None:
    """Add the tensors in `folder`, the directory of one parameter, to `tensors`. The folder's name is the parameter's.

    `shape` is the parameter's, None to take the stored one; `used` is the parameter in the model file, None if it is
    not there. Raises DamagedError for a file without a tensor.
    """
    for file in sorted(folder.glob("*.pt")):
        value: Any = load_structure(file)
        if file.stem == "step":
            tensors[folder.name, "step"] = scalar(value, file)
            continue
        tensor = value.get("param") if isinstance(value, Mapping) else value
        if not isinstance(tensor, torch.Tensor):
            raise DamagedError(f"{file} holds no tensor")
        kind = state_kind(file.stem)
        if kind == "fp32":
            kind = "param" if used is None or used.dtype == torch.float32 else "master"
        tensors[folder.name, kind] = stored(tensor, file).whole(shape)
