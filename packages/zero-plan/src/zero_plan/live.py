"""The same estimates for a model that exists, on any device or on none."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from .errors import PlanError
from .estimators import Estimate, estimate_zero1, estimate_zero2, estimate_zero3

if TYPE_CHECKING:
    from torch import Tensor, nn


class ParameterCount(NamedTuple):
    """Elements in all parameters, and in those that the largest single module owns itself."""

    total: int
    largest_layer: int


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count parameter elements: memory that several parameters share once, meta tensors by identity.

    Raises `PlanError` when the model has no parameter elements, or a lazy module that has not seen data.
    """
    from torch.nn.parameter import is_lazy

    unique: dict[Hashable, int] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PlanError(f"model: {name} has no shape yet; run the model once on an example before counting")
        key = _memory(parameter)
        unique[key] = max(unique.get(key, 0), parameter.numel())
    total = sum(unique.values())
    if not total:
        raise PlanError(f"model: {type(model).__name__} has no parameters, so there is nothing to estimate")
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return ParameterCount(total, largest)


def _memory(parameter: Tensor) -> Hashable:
    """Name the memory of a parameter; one without memory of its own (meta, fake, a wrapper) is only itself."""
    import torch

    if parameter.device.type == "meta" or type(parameter.data) is not torch.Tensor:
        return id(parameter)
    return parameter.device, parameter.data_ptr()


def estimate_zero1_live(
    model: nn.Module, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return `estimate_zero1` of a model."""
    total = count_parameters(model).total
    return estimate_zero1(
        total, gpus_per_node=gpus_per_node, nodes=nodes, additional_buffer_factor=additional_buffer_factor
    )


def estimate_zero2_live(
    model: nn.Module, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return `estimate_zero2` of a model."""
    total = count_parameters(model).total
    return estimate_zero2(
        total, gpus_per_node=gpus_per_node, nodes=nodes, additional_buffer_factor=additional_buffer_factor
    )


def estimate_zero3_live(
    model: nn.Module, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return `estimate_zero3` of a model."""
    total, largest = count_parameters(model)
    return estimate_zero3(
        total, largest, gpus_per_node=gpus_per_node, nodes=nodes, additional_buffer_factor=additional_buffer_factor
    )
