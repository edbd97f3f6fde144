"""The full state dict of a sharded model."""

from __future__ import annotations

import torch
from torch import nn

from .gathered_blocks import gathered
from .partition import Partition


def full_state_dict(
    partition: Partition, module: nn.Module, *, exclude_frozen: bool = False
) -> dict[str, torch.Tensor] | None:
    """Return the state dict of ``module``, the partition's model, with full values in host memory on data rank 0; None
    on other ranks.

    Gathers one unit at a time. Tied parameters share their storage. Entries that are no parameter or buffer (of
    ``get_extra_state``) are left out. ``exclude_frozen``: leave out parameters that require no gradient. Collective.
    Raises `PartitionError` inside a forward or backward pass.
    """
    copies: dict[int, torch.Tensor] = {}
    for unit in partition.units:
        with gathered(partition, unit.parameters, read_only=True):
            if partition.data_rank == 0:
                copies.update((id(p), p.detach().to("cpu", copy=True)) for p in unit.parameters)
    if partition.data_rank:
        return None
    tensors: dict[str, torch.Tensor] = {}
    stored = module.state_dict().keys()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in stored and (parameter.requires_grad or not exclude_frozen):
            if id(parameter) not in copies:
                copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
            tensors[name] = copies[id(parameter)]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in stored:
            tensors[name] = buffer.detach().to("cpu", copy=True)
    return {name: tensors[name] for name in stored if name in tensors}
