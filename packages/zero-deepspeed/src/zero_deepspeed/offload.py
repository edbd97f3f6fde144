"""The hooks that gather at stage 3, by the names with which scripts remove them for generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from zero_partition import Partition

from .optimizer import DeepSpeedOptimizer


class ParameterOffload(DeepSpeedOptimizer):
    """Removes the hooks with which an engine gathers the parameters of its model, and registers them again. It stands
    for all of them as the one handle in its own ``forward_hooks``.

    Without the hooks the model runs as a plain module: inside `GatheredParameters(model.parameters())`, ranks may then
    call it a different number of times.

    ``partition``: the sharded ``module``, whose hooks these are.

    Attributes:
        module: the model (`HookedModule`).
        forward_hooks, backward_hooks: lists of handles with ``remove()``, for scripts that remove all of them.
    """

    def __init__(self, module: nn.Module, partition: Partition) -> None:
        self.module = HookedModule(module)
        self._partition = partition
        self.forward_hooks: list[Any] = [self]
        self.backward_hooks: list[Any] = []

    def remove(self) -> None:
        """Remove the hooks: from now on the model's calls gather nothing. Does not communicate; every rank calls it.
        Raises `PartitionError` inside a pass.
        """
        self._partition.runtime.pause()

    def setup_zero_stage3_hooks(self) -> None:
        """Register the hooks again after `remove`, and make ``forward_hooks`` hold this handle alone."""
        self._partition.runtime.resume()
        self.forward_hooks = [self]

    def _register_deepspeed_module(self, module: Any) -> None:
        """Register the hooks of the model again; ``module`` is not read."""
        self.setup_zero_stage3_hooks()


class HookedModule:
    """A module with the method `ds_external_parameters`, which scripts call; all other attributes are the module's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an empty iterator: `named_parameters` has every parameter of the model, also those that are used
        outside of the module that owns them."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute ``name``, which this object does not have."""
        if name == "_module":
            raise AttributeError(name)
        return getattr(self._module, name)
