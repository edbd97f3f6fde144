"""Full values of sharded parameters, gradients and optimizer states, and the full state dict of a model."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ckpt.coordination import run_on_all_ranks
from zero_partition import (
    full_gradient,
    full_parameter,
    full_state,
    full_state_dict,
    gathered,
    set_full_gradient,
    set_full_parameter,
    set_full_state,
)

from .checkpoint.saving import coordinator_of
from .errors import UsageError
from .state import TrainingState


class FullValues:
    """Gathers and sets full values of what is sharded. Every call is collective, and raises `UsageError` if the engine
    was destroyed or its states are offloaded."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def gathered(self, parameters: Any, modifier_rank: int | None) -> AbstractContextManager[None]:
        """Gather ``parameters``, one or several, in full for the block. ``modifier_rank``: the rank whose changes
        become all ranks'; None keeps changes that are equal on all ranks."""
        return gathered(self._state.partition, parameters, modifier_rank)

    def param(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of the full parameter, from its master if it has one."""
        self._state.check_open("full_param")
        return full_parameter(self._state.partition, parameter)

    def grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the full averaged gradient, between backward and step; None if no rank has one."""
        self._state.check_open("full_grad")
        return full_gradient(self._state.partition, parameter)

    def state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Return a copy of a parameter's full optimizer state ``key``, such as "exp_avg"."""
        return full_state(self._state.partition, self._state.check_trainable("full_state"), parameter, key)

    def set_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace a parameter and its master by rank 0's full ``value``."""
        self._state.check_open("set_full_param")
        set_full_parameter(self._state.partition, parameter, value)

    def set_grad(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the averaged gradient of a parameter by rank 0's full ``value`` until the next step."""
        self._state.check_open("set_full_grad")
        set_full_gradient(self._state.partition, parameter, value)

    def set_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace a parameter's optimizer state ``key``, such as "exp_avg", by rank 0's full ``value``."""
        set_full_state(self._state.partition, self._state.check_trainable("set_full_state"), parameter, key, value)

    def state_dict(self, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        """Return the module's state dict with full values in host memory on rank 0, None on other ranks. Gathers one
        unit at a time. Tied parameters share their storage. ``exclude_frozen``: leave frozen parameters out."""
        self._state.check_open("consolidated_state_dict")
        return full_state_dict(self._state.partition, self._state.module, exclude_frozen=exclude_frozen)

    def save(self, save_dir: str | os.PathLike[str], filename: str, exclude_frozen: bool) -> None:
        """Write `state_dict` by torch.save to ``save_dir/filename`` atomically. Raises `UsageError` for
        safetensors, and `zero_ckpt.CheckpointError` on every rank if the file cannot be written."""
        if Path(filename).suffix == ".safetensors":
            raise UsageError(
                f"save_16bit_model(save_filename={filename!r}): this call writes torch.save's format; "
                "for safetensors save a checkpoint and run `zero-ckpt convert`"
            )
        tensors = self.state_dict(exclude_frozen)

        def write() -> None:
            """Write the state dict on the rank that has it, by way of a second file that is then renamed."""
            if tensors is not None:
                folder = self._state.model_part.subfolder(Path(save_dir))
                folder.mkdir(parents=True, exist_ok=True)
                unfinished = folder / f".{filename}.unfinished"
                torch.save(tensors, unfinished)
                unfinished.replace(folder / filename)

        run_on_all_ranks(self._state.model_part.coordinator or coordinator_of(self._state), "save_16bit_model", write)
