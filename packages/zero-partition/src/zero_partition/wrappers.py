"""Refuse torch's data-parallel wrappers around a model that is sharded, or around the engine that trains it.

Those that are modules are found around whatever holds either; the functions `fully_shard` and `replicate`, which
register no module, around the engine alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from .errors import PartitionError

WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._composable.")
"""The modules of torch that define them."""


class Trains(Protocol):
    """The part of a `Partition` that `refuse_wrappers` needs."""

    def trains(self, module: nn.Module, /) -> bool:
        """Return whether ``module`` is the model or its engine, or has a parameter of the model."""


def refuse_wrappers(partition: Trains) -> Callable[[], object]:
    """Raise `PartitionError`, from now on, whenever a DistributedDataParallel, DataParallel or FullyShardedDataParallel
    is made around a module with parameters of ``partition``, as long as that exists. Return the function that ends the
    check.

    Only that function removes the hook: garbage is collected anywhere, also while torch iterates over its hooks.
    """
    reference = weakref.ref(partition)

    def registered(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        """Raise `PartitionError` if ``parent`` is a data-parallel wrapper of torch's and ``child`` has parameters of
        the partition. Called by torch whenever a module is registered in another."""
        if (
            child is not None
            and any(_is_from_wrappers(cls.__module__) for cls in type(parent).__mro__)
            and (owner := reference()) is not None
            and owner.trains(child)
        ):
            _refuse_wrapper(type(parent).__name__)

    return register_module_module_registration_hook(registered).remove


def register_unless_wrapper(
    engine: nn.Module, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
) -> RemovableHandle:
    """Register ``hook`` on ``engine`` as `torch.nn.Module.register_forward_pre_hook` does, which this replaces as a
    method of engines. Raises `PartitionError` for a hook of torch's functions `fully_shard` and `replicate`, which
    install it before they change parameters."""
    if _is_from_wrappers(getattr(hook, "__module__", None) or ""):
        _refuse_wrapper("fully_shard or replicate")
    return nn.Module.register_forward_pre_hook(engine, hook, prepend=prepend, with_kwargs=with_kwargs)


def _is_from_wrappers(module: str) -> bool:
    """Return whether the Python module named ``module`` lies in one of `WRAPPERS`, torch's data-parallel packages."""
    return f"{module}.".startswith(WRAPPERS)


def _refuse_wrapper(wrapper: str) -> NoReturn:
    """Raise `PartitionError`: ``wrapper``, the name of a class or function of torch, was put around a model or an
    engine."""
    raise PartitionError(
        f"{wrapper} around an engine or the model that it trains: the engine shards or replicates the parameters and "
        "averages the gradients itself. Use the engine as it is; after engine.destroy() the model can be wrapped"
    )
