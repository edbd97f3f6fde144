"""What is sharded, in one piece: parameters, gradients, states, and the weights of a model for saving."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_partition import (
    full_gradient,
    full_parameter,
    full_state,
    gathered,
    set_full_gradient,
    set_full_parameter,
    set_full_state,
)

from .errors import UsageError
from .facts import Facts
from .model_parallel import ModelPart


class WholeValues(Facts):
    """The part of `Engine` that brings sharded values together. Every call is collective."""

    module: nn.Module
    model_part: ModelPart

    @contextmanager
    def gathered(self, parameters: Any, modifier_rank: int | None = None) -> Iterator[None]:
        """Have ``parameters`` whole inside the block (see `zero_partition.gathered`). Collective."""
        with gathered(self._partition, parameters, modifier_rank):
            yield

    def full_param(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the whole parameter in the optimizer's precision. Collective."""
        self._check_open("full_param")
        return full_parameter(self._partition, parameter)

    def full_grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A copy of the whole averaged gradient, or None when no rank has one. Collective."""
        self._check_open("full_grad")
        return full_gradient(self._partition, parameter)

    def full_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A copy of the whole optimizer state ``key`` of a parameter. Collective."""
        return full_state(self._partition, self._check_trainable("full_state"), parameter, key)

    def set_full_param(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace a parameter, its master included, by rank 0's ``value``. Collective."""
        self._check_open("set_full_param")
        set_full_parameter(self._partition, parameter, value)

    def set_full_grad(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the averaged gradient of a parameter by rank 0's ``value`` until the next step. Collective."""
        self._check_open("set_full_grad")
        set_full_gradient(self._partition, parameter, value)

    def set_full_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace the optimizer state ``key`` of a parameter by rank 0's ``value``. Collective."""
        set_full_state(self._partition, self._check_trainable("set_full_state"), parameter, key, value)

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """On rank 0 the module's state dict with whole values, in the dtypes that the module computes in and in host
        memory; None on other ranks. Collective.

        One unit is whole at a time. Tied parameters share their storage.
        """
        self._check_open("consolidated_state_dict")
        parts = self._partition
        copies: dict[int, torch.Tensor] = {}
        for unit in parts.units:
            with gathered(parts, unit.parameters, read_only=True):
                if parts.data_rank == 0:
                    copies.update((id(p), p.detach().to("cpu", copy=True)) for p in unit.parameters)
        if parts.data_rank:
            return None
        tensors: dict[str, torch.Tensor] = {}
        stored = self.module.state_dict().keys()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in stored and (parameter.requires_grad or not exclude_frozen_parameters):
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
                tensors[name] = copies[id(parameter)]
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if name in stored:
                tensors[name] = buffer.detach().to("cpu", copy=True)
        return {name: tensors[name] for name in stored if name in tensors}

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `consolidated_state_dict` with torch.save to ``save_dir/save_filename``, whole or not at all; true.

        Collective. For other formats save a checkpoint and use ``zero-ckpt convert``.
        """
        if Path(save_filename).suffix == ".safetensors":
            raise UsageError(
                f"save_16bit_model(save_filename={save_filename!r}): this call writes torch.save's format; "
                "for safetensors save a checkpoint and run `zero-ckpt convert`"
            )
        tensors = self.consolidated_state_dict(exclude_frozen_parameters)
        if tensors is not None:
            folder = self.model_part.folder(Path(save_dir))
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f".{save_filename}.unfinished"
            torch.save(tensors, unfinished)
            unfinished.replace(folder / save_filename)
        return True

    def empty_partition_cache(self) -> None:
        """Give back the accelerator memory that torch keeps for later; parameters are released after each pass."""
        self._check_open("empty_partition_cache")
        if self._partition.device.type != "cpu":
            torch.accelerator.empty_cache()

    _zero3_consolidated_16bit_state_dict = consolidated_state_dict
    _consolidated_16bit_state_dict = consolidated_state_dict
