"""Parameters get memory on another device and keep their identity."""

from __future__ import annotations

import torch
from torch import nn

from .errors import PartitionError


def set_data(parameter: nn.Parameter, data: torch.Tensor, name: str) -> None:
    """Give ``parameter`` the memory, dtype and device of ``data``, in place, as ``parameter.data = data`` does.
    ``name``: of the parameter, for the error.

    torch refuses that between the CPU and devices that another package adds (PrivateUse1). There the tensor inside the
    Python object is exchanged, which would lose hooks on the parameter's gradient: raises `PartitionError` if it has
    any.
    """
    if torch._has_compatible_shallow_copy_type(parameter, data):
        parameter.data = data
        return
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise PartitionError(
            f"parameter '{name}' has hooks on its gradient, which torch cannot move from {parameter.device} to "
            f"{data.device}: move the model there first, or register them after initialize"
        )
    torch._C._swap_tensor_impl(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
