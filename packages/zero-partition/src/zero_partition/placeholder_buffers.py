"""Find buffers that user code has put over the memory of parameters that are released or will be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .errors import STEP_DROPPED, PartitionError, ReleasedParameterError
from .host_facts import is_fake
from .unit import Unit


def refuse_placeholder_buffers(model: nn.Module, units: Iterable[Unit]) -> None:
    """Raise `ReleasedParameterError`, naming both, if a buffer of ``model`` shares the placeholder of a released
    parameter of ``units``.

    This happens where user code sets the buffer's ``.data`` to the parameter's, which torch does not report; the buffer
    then reads NaN.
    """
    suspects = [(name, buffer) for name, buffer in _with_memory(model) if _repeats_one_element(buffer)]
    places = {
        view.data_ptr(): name
        for unit in (units if suspects else ())
        for placeholders in unit.placeholders
        for name, view in zip(unit.names, placeholders.views, strict=True)
        if not is_fake(view)
    }
    for name, buffer in suspects:
        if (parameter := places.get(buffer.data_ptr())) is not None:
            raise ReleasedParameterError(
                f"buffer '{name}' was given the `.data` of parameter '{parameter}' while that was released, and reads "
                "NaN. Inside `with engine.gathered([parameter])` on every rank give it a copy "
                f"(`buffer.data = parameter.data.clone()`). {STEP_DROPPED}"
            )


def refuse_buffers_in(model: nn.Module, units: Iterable[Unit]) -> None:
    """Raise `PartitionError`, naming both, if a buffer of ``model`` lies in the memory of ``units``, which are gathered
    and about to be released: the buffer would keep today's values while the parameter trains on."""
    places = {unit.flat.untyped_storage().data_ptr(): unit for unit in units if not is_fake(unit.flat)}
    for name, buffer in _with_memory(model) if places else ():
        unit = places.get(buffer.untyped_storage().data_ptr())
        if unit is None:
            continue
        first = buffer.data_ptr()
        for parameter, view in zip(unit.names, unit.views, strict=True):
            if view.data_ptr() <= first < view.data_ptr() + view.nbytes:
                raise PartitionError(
                    f"buffer '{name}' lies in the memory of parameter '{parameter}', which is released now: the buffer "
                    "would keep today's values while the parameter trains on. Give it a copy "
                    f"(`buffer.data = parameter.data.clone()`), or compute it from '{parameter}' in forward."
                )


def _with_memory(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of each buffer of ``model`` that is a strided `torch.Tensor`, of no subclass, and
    not empty."""
    for name, buffer in model.named_buffers():
        if type(buffer) is torch.Tensor and buffer.layout == torch.strided and buffer.numel():
            yield name, buffer


def _repeats_one_element(buffer: torch.Tensor) -> bool:
    """Return whether ``buffer`` has more than one element, all in the memory of a single one, as placeholders have."""
    return buffer.numel() > 1 and not any(n for size, n in zip(buffer.shape, buffer.stride(), strict=True) if size > 1)
