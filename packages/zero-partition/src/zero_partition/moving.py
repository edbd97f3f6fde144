"""Parameters get memory on another device and keep their identity."""

from __future__ import annotations

import torch
from torch import nn


def set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter the memory, dtype and device of ``data``, as ``parameter.data = data`` does.

    torch refuses that between the CPU and devices of other packages (PrivateUse1). There the parameter is exchanged
    with a new one of the same attributes, which nothing refers to weakly and autograd does not hold. Raises
    RuntimeError (torch's) if something does.
    """
    if torch._has_compatible_shallow_copy_type(parameter, data):
        parameter.data = data
        return
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    other.__class__ = parameter.__class__
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
