"""Tell whether the files of a checkpoint of DeepSpeed, one or two per rank, are of one save.

[Note: files of two saves]
DeepSpeed writes the ranks' files into the tag's folder itself. A run that dies while it saves a tag again leaves files
of two saves there, of the same names and sizes. What every rank writes alike tells them apart: counters, steps, and the
loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedError
from ..filing import read_at
from ..types import ITEMSIZE
from .torch_file import StandIn, scalar

_OF_MODELS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "param_shapes", "ds_version")
_OF_OPTIMIZERS = ("zero_stage", "partition_count", "ds_version")
_OF_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter")


def require_one_save(
    models: Sequence[tuple[Path, Mapping[str, Any]]], optimizers: Sequence[tuple[Path, Mapping[str, Any]]]
) -> None:
    """Raise DamagedError, naming two files and what differs, unless all ranks' files are of one save. `models` are
    pairs (model file, its content), `optimizers` pairs (optimizer file, the state in it), both by rank."""
    of_models = [(path, {key: data.get(key) for key in _OF_MODELS}) for path, data in models]
    for found in (of_models, [(path, _facts(path, state)) for path, state in optimizers]):
        for path, facts in found[1:]:
            for key, value in facts.items():
                first = found[0][1].get(key)
                if value != first:
                    values = "" if key == "param_shapes" else f": {value} instead of {first}"
                    raise DamagedError(
                        f"{path} is of another save than {found[0][0].name}, by its {key}{values}. A save that died "
                        "while it wrote the tag again leaves that; load another tag"
                    )


def _facts(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by name, the values in an optimizer's `state` that all ranks of one save have alike; `path` is the
    state's file."""
    facts = {key: _comparable(path, state.get(key)) for key in _OF_OPTIMIZERS}
    scaler = state.get("loss_scaler")
    if isinstance(scaler, StandIn):
        facts |= {f"loss scale ({key})": _comparable(path, scaler.attributes.get(key)) for key in _OF_SCALES}
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups = inner.get("state") if isinstance(inner, Mapping) else None
    for number, held in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(held, Mapping):
            facts[f"step of group {number}"] = _comparable(path, held.get("step"))
    return facts


def _comparable(path: Path, value: Any) -> Any:
    """Return `value` in a form that can be compared with `==`: the number in a one-element tensor, whose data is read
    from the file `path`; the value of an enum; strings, numbers and lists as they are; None for anything else."""
    if isinstance(value, StandIn):
        return value.arguments
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return value if isinstance(value, (str, int, float, list)) else None
    held = scalar(value, path)
    raw = bytearray(ITEMSIZE[held.dtype])
    read_at(path, held.segments[0].begin, memoryview(raw), f"{path}: a number")
    return torch.frombuffer(raw, dtype=value.dtype).item()
