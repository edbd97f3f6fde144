"""The small files under DeepSpeed's names in a checkpoint's folder, for scripts that look for them and read facts.

They hold what DeepSpeed's files of the first rank say besides tensors; tensors are in the safetensors files beside
them. Nothing here reads them back.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import torch

from zero_core.checkpoint.names import aliases, named_parameters
from zero_core.checkpoint.scheduler_state import plain_state
from zero_core.errors import UsageError
from zero_core.state import TrainingState

from . import VERSION

_OPTIMIZER_FILES = "*_optim_states.pt"


def state_files(state: TrainingState, config: dict[str, Any], client_state: dict[str, Any]) -> dict[str, bytes]:
    """Name -> contents, for `torch.load`: the model's file, and from stage 1 the optimizer's. ``config``: as given."""
    stage, part, ranks = state.partition.options.stage, state.model_part.place, state.partition.data_world_size
    facts = {"ds_config": config, "ds_version": VERSION}
    shapes: dict[bool, dict[str, torch.Size]] = {True: {}, False: {}}
    for name, parameter in state.module.named_parameters():
        shapes[parameter.requires_grad][name] = parameter.shape
    scheduler, counters = state.attached.scheduler, state.counters
    model = {
        "module": None,
        "buffer_names": [name for name, _ in state.module.named_buffers()],
        "param_shapes": [shapes[True]],
        "frozen_param_shapes": shapes[False] or None,
        "shared_params": aliases(named_parameters(state.module)),
        "lr_scheduler": None if scheduler is None else plain_state(scheduler),
        "skipped_steps": counters.skipped_steps,
        "global_steps": counters.global_steps,
        "global_samples": counters.global_samples,
        "dp_world_size": ranks,
        "mp_world_size": part.size,
        **facts,
        **client_state,
    }
    files = {_model_name(stage, part.rank): _saved(model)}
    if stage > 0 and state.optimizer is not None:
        inner = {"zero_stage": stage, "partition_count": ranks, "ds_version": VERSION}
        prefix = "bf16_" if state.config.bf16.enabled else ""
        name = f"{prefix}zero_pp_rank_0_mp_rank_{part.rank:02d}_optim_states.pt"
        files[name] = _saved({"optimizer_state_dict": inner, **facts})
    return files


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The path of the model's file in the folder of one tag. Raises FileNotFoundError."""
    path = _folder(checkpoint_dir) / _model_name(zero_stage, 0)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model states file at '{path}'")
    return str(path)


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The paths of the optimizer's files in the folder of one tag, by rank. Raises FileNotFoundError."""
    return _globbed(checkpoint_dir, _OPTIMIZER_FILES)


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The paths of the model's files in the folder of one tag, by rank. Raises FileNotFoundError."""
    return _globbed(checkpoint_dir, "*_model_states.pt")


def _model_name(stage: int, part: int) -> str:
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"zero_stage: expected 0, 1, 2 or 3, got {stage!r}")
    return f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_{part:02d}_model_states.pt"


def _folder(checkpoint_dir: str | os.PathLike[str]) -> Path:
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"the directory '{folder}' does not exist")
    return folder


def _globbed(checkpoint_dir: str | os.PathLike[str], pattern: str) -> list[str]:
    found = _folder(checkpoint_dir).glob(pattern)
    numbered = sorted(found, key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)])
    if not numbered:
        raise FileNotFoundError(f"there are no {pattern} files in '{checkpoint_dir}'")
    return [str(path) for path in numbered]


def _saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
