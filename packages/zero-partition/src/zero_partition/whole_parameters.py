"""Parameters of the model that no unit holds: replicated ones, and those put into the model after `partition`."""

from __future__ import annotations

import torch
from torch import nn

from zero_comm import Tag

from .errors import PartitionError
from .partition import Partition


def is_whole(partition: Partition, parameter: nn.Parameter) -> bool:
    """Return whether every rank has all of ``parameter``: one of the model that no unit holds, or any empty one."""
    return partition.find(parameter) is None and (parameter.numel() == 0 or partition.name_of(parameter) is not None)


def set_whole(partition: Partition, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Write rank 0's ``value`` into ``parameter``, for which `is_whole` holds, on every rank. Collective.

    Other ranks pass any tensor of the parameter's shape. Raises `PartitionError` on every rank if a rank passes another
    shape.
    """
    name, refusal = partition.name_of(parameter) or "", None
    if value.shape != parameter.shape:
        shapes = f"{tuple(value.shape)}, expected {tuple(parameter.shape)}"
        refusal = f"the new parameter of '{name}' has shape {shapes}"
    for told in partition.runtime.agree("set full parameter", name, refusal):
        if told is not None:
            raise PartitionError(told)
    sent = value.detach().to(parameter.device, parameter.dtype, copy=True).contiguous()
    if sent.numel():
        partition.groups.broadcast(sent, 0, Tag("broadcast", name, partition.runtime.step))
    with torch.no_grad():
        parameter.copy_(sent)


def explain_missing(partition: Partition, parameter: nn.Parameter) -> str:
    """Return, as the text of an error, why the engine has no gradient, state or shard of ``parameter``, which no unit
    holds."""
    name = partition.name_of(parameter)
    if name is None:
        return f"a parameter of shape {tuple(parameter.shape)} does not belong to this engine's model"
    if name in partition.replicated:
        reason = partition.replicated[name]
        return f"parameter '{name}' has no gradient and no state: every rank has all of it, as {reason}"
    return (
        f"parameter '{name}' was put into the model after initialize: the engine does not average its gradient, has no "
        "state of it and does not update it. Create the engine again (engine.destroy(), then initialize), or put the "
        "parameter into the model before."
    )
