"""Find buffers that user code has put over the memory of a released parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .errors import STEP_DROPPED, ReleasedParameterError
from .host_facts import is_fake
from .unit import Unit


def refuse_placeholder_buffers(model: nn.Module, units: Iterable[Unit]) -> None:
    """Raise `ReleasedParameterError` if a buffer of ``model`` lies over the placeholder of a released parameter, whose
    ``.data`` it was set to: it reads NaN, and torch tells nobody about the assignment."""
    places = {
        view.data_ptr(): name
        for unit in units
        for placeholders in unit.placeholders
        for name, view in zip(unit.names, placeholders.views, strict=True)
        if not is_fake(view)
    }
    for name, buffer in model.named_buffers():
        if type(buffer) is not torch.Tensor or buffer.layout != torch.strided or not buffer.numel():
            continue
        if (parameter := places.get(buffer.data_ptr())) is not None:
            raise ReleasedParameterError(
                f"buffer '{name}' was given the `.data` of parameter '{parameter}' while that was released, and reads "
                "NaN. Inside `with engine.gathered([parameter])` on every rank give it a copy "
                f"(`buffer.data = parameter.data.clone()`). {STEP_DROPPED}"
            )
