"""Small files with DeepSpeed's names in a checkpoint's folder, for scripts that look for them.

They hold the content of DeepSpeed's files of the first rank without its tensors, which are in the safetensors files of
the folder. Loading a checkpoint does not read them.
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
_MOST_TAG_CHARACTERS = 4096


def state_files(state: TrainingState, config: dict[str, Any], client_state: dict[str, Any]) -> dict[str, bytes]:
    """Return name -> content (for `torch.load`) of the model's file and, from stage 1 on if there is an optimizer, of
    the optimizer's file.

    ``state``: of the engine that saves. ``config``: as the user gave it. ``client_state``: as the user gave it; its
    keys stand beside DeepSpeed's in the model's file, and replace those of the same name.
    """
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
    files = {_model_file_name(stage, part.rank): _torch_saved(model)}
    if stage > 0 and state.optimizer is not None:
        inner = {"zero_stage": stage, "partition_count": ranks, "ds_version": VERSION}
        prefix = "bf16_" if state.config.bf16.enabled else ""
        name = f"{prefix}zero_pp_rank_0_mp_rank_{part.rank:02d}_optim_states.pt"
        files[name] = _torch_saved({"optimizer_state_dict": inner, **facts})
    return files


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """Return the path of the first rank's model file in ``checkpoint_dir``, the folder of a tag, which was saved at
    ``zero_stage``.

    Raises FileNotFoundError if the folder or the file is not there, `UsageError` for a stage other than 0 to 3.
    """
    path = _existing_folder(checkpoint_dir) / _model_file_name(zero_stage, 0)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model states file at '{path}'")
    return str(path)


def latest_universal(root: str | os.PathLike[str]) -> str | None:
    """Return the tag of the newest universal checkpoint in the folder ``root``, as its file `latest_universal` names
    it; None without such a file, or if it is empty."""
    path = Path(root) / "latest_universal"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_TAG_CHARACTERS).strip() or None


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the optimizer's files in ``checkpoint_dir``, the folder of a tag, in the order of ranks.
    Raises FileNotFoundError if the folder or the files are not there."""
    return _files_by_rank(checkpoint_dir, _OPTIMIZER_FILES)


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the model's files in ``checkpoint_dir``, the folder of a tag, in the order of ranks. Raises
    FileNotFoundError if the folder or the files are not there."""
    return _files_by_rank(checkpoint_dir, "*_model_states.pt")


def _model_file_name(stage: int, model_parallel_rank: int) -> str:
    """Return DeepSpeed's name of the model's file at ``stage`` for a rank of a model-parallel group; `UsageError` for a
    stage other than 0 to 3."""
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"zero_stage: expected 0, 1, 2 or 3, got {stage!r}")
    return f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_{model_parallel_rank:02d}_model_states.pt"


def _existing_folder(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Return ``checkpoint_dir`` as a Path. Raises FileNotFoundError if there is no such folder."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"the directory '{folder}' does not exist")
    return folder


def _files_by_rank(checkpoint_dir: str | os.PathLike[str], pattern: str) -> list[str]:
    """Return the paths of the files in a folder that match ``pattern``, sorted by the numbers in their names, which are
    ranks. Raises FileNotFoundError if the folder is not there or none match."""
    found = _existing_folder(checkpoint_dir).glob(pattern)
    numbered = sorted(found, key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)])
    if not numbered:
        raise FileNotFoundError(f"there are no {pattern} files in '{checkpoint_dir}'")
    return [str(path) for path in numbered]


def _torch_saved(state: dict[str, Any]) -> bytes:
    """Return the bytes that `torch.save` writes for ``state``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
