"""The weights of a model under their base model's names, with the adapters that PEFT has put around its layers.

[Note: adapters] PEFT replaces a layer by one that holds it as ``base_layer``, beside the adapter's own parameters. What
such a layer's ``merge`` writes into the base layer is what a server without adapters needs. That method is called here
on a shallow copy of the layer, whose base layer has copies of its parameters: the arithmetic is PEFT's own, for every
kind of adapter, and nothing of the model changes. Layers are known by their attributes, so PEFT need not be installed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import PartitionError


@dataclass(frozen=True)
class NamedWeight:
    """One weight of the base model, the model that PEFT's adapters were put around.

    ``name``: in the base model. ``parameter``: its values without adapters. ``owner``: the module that has
    ``parameter`` as attribute ``key``. ``layers``: PEFT's layers around ``owner`` whose adapters are to be merged into
    the weight, inner ones first.
    """

    name: str
    parameter: nn.Parameter
    owner: nn.Module
    key: str
    layers: tuple[Any, ...] = ()

    @property
    def sources(self) -> list[nn.Parameter]:
        """Return the parameters from which the merged weight is computed: ``parameter`` and those of ``layers``, each
        once."""
        parameters = [p for layer in self.layers for p in layer.parameters()]
        return list({id(p): p for p in (self.parameter, *parameters)}.values())


def base_weights(model: nn.Module) -> list[NamedWeight]:
    """Return the weights of ``model`` under their names in the model inside its adapters, each parameter once, under
    its first name, in the order of the modules.

    The ``layers`` of a weight are those whose adapters are active and not merged yet (`merged_values` merges them).
    Where PEFT trains a copy of a module (``modules_to_save``), the active copy has the weights. Raises
    `PartitionError`, which names the parameter or layer, for a parameter of an adapter that is no change of a layer
    (prompt tuning), where two layers adapt one tied parameter, and for a layer with adapters inside another one.
    """
    base = _base_of(model)
    found: dict[int, NamedWeight] = {}
    for weight in _walk_weights(base, "", ()):
        first = found.setdefault(id(weight.parameter), weight)
        if first.owner is not weight.owner and (first.layers or weight.layers):
            raise PartitionError(
                f"'{first.name}' and '{weight.name}' are one parameter, and an adapter changes it: the base model has "
                "no parameter for each. Untie them, or take the adapters apart with merge_adapters=False."
            )
    if base is not model:
        known = {id(p) for p in base.parameters()}
        other = next((name for name, p in model.named_parameters() if id(p) not in known), None)
        if other is not None:
            raise PartitionError(
                f"parameter '{other}' belongs to an adapter that is no change of a layer, and cannot be merged into "
                "one; use merge_adapters=False"
            )
    return list(found.values())


def plain_weights(model: nn.Module) -> list[NamedWeight]:
    """Return the parameters of ``model``, adapters' among them, each once and under its own name, with no adapters to
    merge."""
    modules = dict(model.named_modules())
    weights = []
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        weights.append(NamedWeight(name, parameter, modules[owner], key))
    return weights


def merged_values(weight: NamedWeight) -> dict[str, torch.Tensor]:
    """Return ``weight.owner``'s parameters, by attribute, with the adapters of ``weight.layers`` merged into them, as
    new tensors; only that of ``weight.key`` where an adapter changes single parameters. The model stays as it is; see
    [Note: adapters].

    All parameters of the owner and of the layers must be gathered. Memory: the owner's parameters once more, and what
    PEFT's ``merge`` needs.
    """
    owner = copy.copy(weight.owner)
    one = any(hasattr(layer, "parameter_name") for layer in weight.layers)
    copied = {
        key: nn.Parameter(p.detach().clone(), requires_grad=False)
        for key, p in weight.owner.named_parameters(recurse=False)
        if not one or key == weight.key
    }
    owner.__dict__["_parameters"] = copied
    for layer in weight.layers:
        alone = copy.copy(layer)
        alone.__dict__.update({key: held.copy() for key, held in vars(alone).items() if type(held) in (list, dict)})
        inner = {key: _with_own_containers(child) for key, child in layer._modules.items()}
        alone.__dict__["_modules"] = {**inner, "base_layer": owner}
        alone.merge()
        if alone._modules["base_layer"] is not owner:  # the adapter is the layer, as LayerNorm tuning's
            owner = alone._modules["base_layer"]
            copied = {key: p.detach().clone() for key, p in owner.named_parameters(recurse=False)}
    return {key: p.detach() for key, p in copied.items()}


def _with_own_containers(module: nn.Module | None) -> nn.Module | None:
    """Return a shallow copy of ``module`` with dicts of its own for parameters, buffers and children; the tensors and
    children in them are shared. None for None."""
    if module is None:
        return None
    alone = copy.copy(module)
    alone.__dict__.update({key: dict(held) for key, held in vars(module).items() if type(held) is dict})
    return alone


def adapter_state(model: nn.Module) -> list[Any]:
    """Return, as plain data, [module name, names of its active adapters, names of its merged adapters] for each module
    of ``model`` that PEFT has put around another."""
    return [
        [name, _active_adapters(module), list(getattr(module, "merged_adapters", ()))]
        for name, module in model.named_modules()
        if _is_adapted(module) or "original_module" in module._modules
    ]


def base_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over (name, persistent buffer) of ``model``, with the names in the model inside its
    adapters."""
    return _walk_buffers(_base_of(model), "")


def plain_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, persistent buffer) of ``model``, adapters' among them, under their own names."""
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if key not in module._non_persistent_buffers_set:
                yield _join_name(name, key), buffer


def _base_of(model: Any) -> nn.Module:
    """Return the model inside PEFT's wrapper ``model``; ``model`` itself if it is no such wrapper."""
    wrapped = "base_model" in model._modules and hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    found: nn.Module = model.get_base_model() if wrapped else model
    return found


def _walk_weights(module: Any, name: str, layers: tuple[Any, ...]) -> Iterator[NamedWeight]:
    """Yield the weights of ``module``, which is called ``name`` in the base model, and of its submodules there.

    ``layers``: PEFT's layers around ``module`` whose adapters are to be merged, inner ones first. Raises
    `PartitionError` for a layer with adapters inside another one.
    """
    if _is_adapted(module):
        inner = module.get_base_layer()
        active = [one for one in _active_adapters(module) if one not in module.merged_adapters]
        around = (module, *layers) if active else layers
        yield from _walk_weights(module.base_layer, name, around)
        if around and not hasattr(module, "parameter_name") and any(map(_is_adapted, inner.modules())):
            raise PartitionError(f"'{name}': a layer with adapters inside another one; use merge_adapters=False")
        return
    for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        mine = tuple(one for one in layers if getattr(one, "parameter_name", key) == key)
        yield NamedWeight(_join_name(name, key), parameter, module, key, mine)
    for key, child in _base_children(module, name):
        yield from _walk_weights(child, key, ())


def _walk_buffers(module: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the base model, persistent buffer) of ``module``, which is called ``name`` there, and of its
    submodules."""
    if _is_adapted(module):
        yield from _walk_buffers(module.base_layer, name)
        return
    for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if key not in module._non_persistent_buffers_set:
            yield _join_name(name, key), buffer
    for key, child in _base_children(module, name):
        yield from _walk_buffers(child, key)


def _base_children(module: Any, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name in the base model, submodule) of ``module``, which is called ``name`` there, without adapters. Where
    PEFT trains a copy of a module, only the one in use, under the module's name."""
    held: Any = module._modules
    if "original_module" in held and "token_adapter" in held:
        yield name, held["token_adapter"]
    elif "original_module" in held and "modules_to_save" in held:
        active = [one for one in held["modules_to_save"] if one in _active_adapters(module)]
        yield name, held["modules_to_save"][active[0]] if active else held["original_module"]
    else:
        yield from ((_join_name(name, key), child) for key, child in held.items() if child is not None)


def _active_adapters(module: Any) -> list[str]:
    """Return the names of the adapters of PEFT's layer ``module`` that forward uses now; empty while they are switched
    off."""
    return [] if getattr(module, "disable_adapters", False) else list(module.active_adapters)


def _is_adapted(module: Any) -> bool:
    """Return whether ``module`` is a layer of PEFT's that holds another layer as ``base_layer``."""
    return "base_layer" in module._modules and hasattr(module, "adapter_layer_names") and hasattr(module, "merge")


def _join_name(name: str, key: str) -> str:
    """Return the name of attribute ``key`` of the module called ``name``, as in `named_parameters`: "name.key", or
    "key" for the model itself."""
    return f"{name}.{key}" if name else key
