"""DeepSpeed's estimates (`estimators.py`) for a torch model, whose parameters may be on any device or on meta."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from .errors import PlanError
from .estimators import Estimate, estimate_zero1, estimate_zero2, estimate_zero3

if TYPE_CHECKING:
    from torch import Tensor, nn


class ParameterCount(NamedTuple):
    """Parameter elements of the model (``total``), and of the largest module without its submodules."""

    total: int
    largest_layer: int


def count_parameters(model: nn.Module) -> ParameterCount:
    """Return the number of parameter elements of a model, and of its largest module alone. Memory that several
    parameters share counts once in the total; meta tensors share memory only if they are the same tensor.

    Raises `PlanError` if the model has no parameter elements, or an uninitialised lazy module.
    """
    from torch.nn.parameter import is_lazy

    unique: dict[Hashable, int] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PlanError(f"model: {name} has no shape yet; run the model once on an example before counting")
        key = _address_key(parameter)
        unique[key] = max(unique.get(key, 0), parameter.numel())
    total = sum(unique.values())
    if not total:
        raise PlanError(f"model: {type(model).__name__} has no parameters, so there is nothing to estimate")
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return ParameterCount(total, largest)


def _address_key(parameter: Tensor) -> Hashable:
    """Return a key that is equal for parameters whose memory begins at the same address. The key of a tensor without an
    address of its own (meta, fake, a wrapper) is its identity.
    """
    import torch

    if parameter.device.type == "meta" or type(parameter.data) is not torch.Tensor:
        return id(parameter)
    return parameter.device, parameter.data_ptr()


def estimate_zero1_live(
    model: nn.Module, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return `estimate_zero1` for the parameters of ``model``: bytes of main memory per node and of memory per GPU.

    The other arguments are those of `estimate_zero1`. Raises `PlanError` for a model without parameters, one that is
    not initialised, and numbers below 1.
    """
    total = count_parameters(model).total
    return estimate_zero1(
        total, gpus_per_node=gpus_per_node, nodes=nodes, additional_buffer_factor=additional_buffer_factor
    )


def estimate_zero2_live(
    model: nn.Module, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return `estimate_zero2` for the parameters of ``model``: bytes of main memory per node and of memory per GPU.

    The other arguments are those of `estimate_zero2`. Raises `PlanError` for a model without parameters, one that is
    not initialised, and numbers below 1.
    """
    total = count_parameters(model).total
    return estimate_zero2(
        total, gpus_per_node=gpus_per_node, nodes=nodes, additional_buffer_factor=additional_buffer_factor
    )


def estimate_zero3_live(
    model: nn.Module, *, gpus_per_node: int = 1, nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Estimate:
    """Return `estimate_zero3` for the parameters of ``model``: bytes of main memory per node and of memory per GPU.

    The other arguments are those of `estimate_zero3`. Raises `PlanError` for a model without parameters, one that is
    not initialised, and numbers below 1.
    """
    total, largest = count_parameters(model)
    return estimate_zero3(
        total, largest, gpus_per_node=gpus_per_node, nodes=nodes, additional_buffer_factor=additional_buffer_factor
    )
