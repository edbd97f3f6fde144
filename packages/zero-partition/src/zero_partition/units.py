"""Divide a model into units: which parameters are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .errors import PartitionError
from .host_facts import is_plain
from .released import ReleasedValues

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MOST_OF_A_SUBTREE = 64_000_000
_MOST_OF_A_LAYER = 1_000_000_000
"""Elements of one layer, a block of a transformer, that stay together: the collectives of smaller units cost more time
than they hide."""


@dataclass(frozen=True)
class UnitLimits:
    """Bounds, in elements, for dividing a model into units.

    Module subtrees above ``max_numel`` are divided further (None: those above 64,000,000, layers above 1,000,000,000,
    where a layer is a subtree without a list of layers of its own); neighbouring small units are merged up to
    ``min_numel``; parameters of one element, and those below ``persistence_threshold``, are persistent.
    """

    max_numel: int | None = None
    min_numel: int = 250_000
    persistence_threshold: int = 0

    def most_of(self, subtree: nn.Module) -> int:
        """Return the largest number of elements at which the module ``subtree`` stays one unit: ``max_numel`` if given,
        else a bound that depends on whether ``subtree`` contains a list of layers."""
        if self.max_numel is not None:
            return self.max_numel
        return _MOST_OF_A_SUBTREE if _holds_layers(subtree) else _MOST_OF_A_LAYER


@dataclass
class UnitPlan:
    """The plan of one unit, before its tensors exist: parameters of one dtype, all trainable or all frozen.

    ``parameters``: by name. ``members``: by name, the modules whose forward uses the unit; it may be released when all
    of them have run.
    """

    name: str
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    members: dict[str, nn.Module] = field(default_factory=dict)


@dataclass
class _Group:
    """Neighbouring modules of the tree that will become one unit for each dtype, trainability and persistence.

    ``members``, ``parameters``: by name in the model. ``mergeable``: it may be merged with a neighbour.
    """

    name: str
    members: dict[str, nn.Module] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    mergeable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements of the group's parameters."""
        return sum(p.numel() for p in self.parameters.values())


def plan_units(
    model: nn.Module,
    limits: UnitLimits,
    *,
    trainable: Callable[[nn.Parameter], bool],
    dtype_of: Callable[[str, nn.Parameter], torch.dtype],
    is_leaf: Callable[[str, nn.Module], bool] = lambda name, module: False,
) -> list[UnitPlan]:
    """Return the units of ``model`` in module order; each parameter is in one of them, by its first name.

    A subtree that fits `UnitLimits.most_of` and is an element of a ModuleList, Sequential or ModuleDict is a unit;
    larger subtrees are divided, unless ``is_leaf`` (by name and module); the remaining modules are merged up to
    ``limits.min_numel``. Parameters of another dtype, trainability or persistence form a unit of their own.
    ``trainable``: returns whether a parameter is trained. ``dtype_of``: returns the dtype in which a parameter, by
    name, computes. Parameters that cannot be sharded (empty, not floating point, tensor subclasses) are left out;
    `replicated_parameters` lists them.
    """
    owners = _owners_by_parameter(model)
    groups = _merge_small(_divide("", model, limits, is_leaf), limits)
    plans: dict[tuple[str, torch.dtype, bool, bool], UnitPlan] = {}
    placed: set[int] = set()
    for group in groups:
        for name, parameter in group.parameters.items():
            if id(parameter) in placed or reason_replicated(parameter) is not None:
                continue
            placed.add(id(parameter))
            dtype = dtype_of(name, parameter)
            persistent = parameter.numel() <= 1 or parameter.numel() < limits.persistence_threshold
            key = (group.name, dtype, trainable(parameter), persistent)
            if key not in plans:
                plans[key] = UnitPlan(_unit_name(*key), dtype, key[2], persistent)
            plan = plans[key]
            plan.parameters[name] = parameter
            plan.members.update(group.members)
            plan.members.update(owners[id(parameter)] if len(owners[id(parameter)]) > 1 else {})
    return list(plans.values())


def replicated_parameters(model: nn.Module) -> dict[str, str]:
    """Return, by name, the parameters that no unit can hold, so that they are replicated, with the reasons."""
    found = ((name, reason_replicated(p)) for name, p in model.named_parameters())
    return {name: reason for name, reason in found if reason is not None}


def reason_replicated(parameter: nn.Parameter) -> str | None:
    """Return why a parameter cannot be part of a flat buffer, so that it is replicated, such as "it is empty"; None if
    it can be part of one."""
    values = parameter.data
    if not is_plain(values) and type(values) is not ReleasedValues:  # the latter: Init has built and sharded it
        return f"it is a tensor subclass ({type(values).__name__})"
    if parameter.layout != torch.strided:
        return f"its layout is {parameter.layout}"
    if not parameter.is_floating_point():
        return f"its dtype {parameter.dtype} is not floating point"
    if parameter.numel() == 0:
        return "it is empty"
    return None


def check_trainable_shards(model: nn.Module) -> None:
    """Raise `PartitionError`, naming the parameter, if a replicated parameter of ``model`` requires gradients, which
    would not be reduced. Empty parameters pass."""
    for name, parameter in model.named_parameters():
        reason = reason_replicated(parameter)
        if reason is not None and parameter.requires_grad and parameter.numel() > 0:
            raise PartitionError(
                f"parameter '{name}' requires gradients but cannot be partitioned: {reason}. "
                "Freeze it (requires_grad_(False)) or replace it by a plain floating-point parameter."
            )


def _owners_by_parameter(model: nn.Module) -> dict[int, dict[str, nn.Module]]:
    """Return, by id of a parameter, the modules that have it as their own, by name in the model; a tied parameter has
    several."""
    owners: dict[int, dict[str, nn.Module]] = {}
    for module_name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), {})[module_name] = module
    return owners


def _divide(
    name: str, module: nn.Module, limits: UnitLimits, is_leaf: Callable[[str, nn.Module], bool]
) -> Iterator[_Group]:
    """Yield groups in module order: the own parameters of ``module``, called ``name``, first, then its children.

    A child is one group if ``is_leaf`` (by name and module), or if ``module`` is a ModuleList, Sequential or
    ModuleDict, the child is not one itself, and it fits ``limits``. Others are divided in turn; those without
    parameters are left out.
    """
    own = {_dotted_name(name, key): p for key, p in module._parameters.items() if p is not None}
    if own:
        yield _Group(name or "root", {name: module}, own)
    for key, child in module.named_children():
        child_name = _dotted_name(name, key)
        whole = dict(_named_parameters(child_name, child))
        numel = sum(p.numel() for p in whole.values())
        if not whole:
            continue
        if is_leaf(child_name, child):
            yield _Group(child_name, {child_name: child}, whole, mergeable=False)
        elif isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS) and numel <= limits.most_of(child):
            yield _Group(child_name, {child_name: child}, whole, mergeable=numel < limits.min_numel)
        else:
            yield from _divide(child_name, child, limits, is_leaf)


def _holds_layers(subtree: nn.Module) -> bool:
    """Return whether a ModuleList, Sequential or ModuleDict in ``subtree`` has two or more elements that contain
    modules."""
    lists = (module for module in subtree.modules() if isinstance(module, _CONTAINERS))
    return any(sum(any(True for _ in element.children()) for element in found.children()) >= 2 for found in lists)


def _merge_small(groups: Iterator[_Group], limits: UnitLimits) -> list[_Group]:
    """Return ``groups`` with neighbours merged up to ``limits.min_numel`` elements, so that no collective is tiny; a
    group that is not ``mergeable`` stays as it is."""
    merged: list[_Group] = []
    for group in groups:
        last = merged[-1] if merged else None
        if last is not None and last.mergeable and group.mergeable and last.numel + group.numel <= limits.min_numel:
            last.members.update(group.members)
            last.parameters.update(group.parameters)
        else:
            merged.append(group)
    return merged


def _named_parameters(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name in the model, parameter) for ``module`` and its submodules; ``prefix``: the module's name in the
    model."""
    for name, parameter in module.named_parameters():
        yield _dotted_name(prefix, name), parameter


def _dotted_name(prefix: str, name: str) -> str:
    """Return ``name`` below ``prefix``, joined by a dot; ``name`` alone for an empty prefix."""
    return f"{prefix}.{name}" if prefix else name


def _unit_name(group: str, dtype: torch.dtype, trainable: bool, persistent: bool) -> str:
    """Return a unit's name, for example "layers.0 [bfloat16, frozen]"."""
    marks = (
        [str(dtype).removeprefix("torch.")] + ([] if trainable else ["frozen"]) + (["persistent"] if persistent else [])
    )
    return f"{group} [{', '.join(marks)}]"
