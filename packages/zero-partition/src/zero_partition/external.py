"""Declarations of users about modules that the module tree does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from .ownership import find_owner

_EXTERNAL = "_zero_external_parameters"
_LEAF = "_zero_leaf"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Have ``parameter`` gathered whenever ``module`` runs, though another module owns it.

    For code that holds the parameter itself instead of reading it from its owner, which brings it anyway. Before or
    after the model is partitioned.
    """
    registered: list[nn.Parameter] = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(known is parameter for known in registered):
        registered.append(parameter)
    owner = find_owner(parameter)
    if owner is not None:
        owner.add_use(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter` for engines that are made from now on."""
    registered = module.__dict__.get(_EXTERNAL, [])
    registered[:] = [known for known in registered if known is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters registered for ``module``."""
    return list(module.__dict__.get(_EXTERNAL, []))


def set_leaf_modules(
    model: nn.Module, chosen: Iterable[type[nn.Module] | str], *, leaf: bool = True
) -> list[nn.Module]:
    """Have the modules chosen gathered together with their children, however large: they choose inside what to run.

    ``chosen``: classes, names of classes (with or without their package) or names of modules in ``model``. Before the
    model is partitioned. Returns the modules; ValueError names a choice that fits none.
    """
    found: dict[int, nn.Module] = {}
    for choice in chosen:
        fits = [module for name, module in model.named_modules() if _fits(choice, name, module)]
        if not fits:
            raise ValueError(f"set_leaf_modules: no module of the model is {choice!r}")
        found.update((id(module), module) for module in fits)
    for module in found.values():
        module.__dict__[_LEAF] = leaf
    return list(found.values())


def leaf_marker(
    classes: Iterable[str] = (), names: Iterable[str] = (), suffixes: Iterable[str] = ()
) -> Callable[[str, nn.Module], bool]:
    """Return whether a module is gathered together with its children: by its class's name, its own name, the end of its
    name, or because it was marked."""
    known, exact, ends = set(classes), set(names), tuple(suffixes)

    def is_leaf(name: str, module: nn.Module) -> bool:
        marked = module.__dict__.get(_LEAF)
        if marked is not None:
            return bool(marked)
        kinds = {n for kind in type(module).__mro__ for n in _class_names(kind)}
        return bool(kinds & known) or name in exact or (bool(ends) and name.endswith(ends))

    return is_leaf


def _class_names(kind: type) -> tuple[str, str]:
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def _fits(choice: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        return name == choice or choice in _class_names(type(module))
    return isinstance(module, choice)
