"""The hooks that gather at stage 3, by the names with which scripts switch them off for generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from zero_partition import Partition

from .optimizer import DeepSpeedOptimizer


class ParameterOffload(DeepSpeedOptimizer):
    """Removes the hooks of an engine's model and registers them again.

    Without the hooks the model runs as a plain module, which is of use inside `GatheredParameters(model.parameters())`:
    ranks may then call it a different number of times.

    Attributes:
        module: the model (`HookedModule`).
        forward_hooks, backward_hooks: lists of handles with ``remove()``.
    """

    def __init__(self, module: nn.Module, partition: Partition) -> None:
        self.module = HookedModule(module)
        self._partition = partition
        self.forward_hooks: list[Any] = [self]
        self.backward_hooks: list[Any] = []

    def remove(self) -> None:
        """Take the hooks away."""
        self._partition.runtime.pause()

    def setup_zero_stage3_hooks(self) -> None:
        """Register the hooks again."""
        self._partition.runtime.resume()
        self.forward_hooks = [self]

    def _register_deepspeed_module(self, module: Any) -> None:
        self.setup_zero_stage3_hooks()


class HookedModule:
    """A module with the one name more that scripts ask for; everything else is the module's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Nothing: a parameter that is used elsewhere is found where it belongs, by `named_parameters`."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name == "_module":
            raise AttributeError(name)
        return getattr(self._module, name)
