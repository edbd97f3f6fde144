"""Users' declarations about modules that the module tree does not show: external parameters and leaf modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from .ownership import find_owner

_EXTERNAL = "_zero_external_parameters"
_LEAF = "_zero_leaf"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Have ``parameter`` gathered whenever ``module`` runs, though another module owns it.

    For code of ``module`` that holds the parameter itself; reading it from its owner gathers it anyway. Call it before
    or after the model is partitioned; a second call does nothing.
    """
    registered: list[nn.Parameter] = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(known is parameter for known in registered):
        registered.append(parameter)
    owner = find_owner(parameter)
    if owner is not None:
        owner.add_use(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter` for engines that are made later; existing ones still gather ``parameter`` for
    ``module``. Does nothing if it was not registered."""
    registered = module.__dict__.get(_EXTERNAL, [])
    registered[:] = [known for known in registered if known is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters registered for ``module`` by `register_external_parameter`, in a new list."""
    return list(module.__dict__.get(_EXTERNAL, []))


def set_leaf_modules(
    model: nn.Module, chosen: Iterable[type[nn.Module] | str], *, leaf: bool = True
) -> list[nn.Module]:
    """Mark modules as leaves, each of which is gathered together with all its children, however large; return the
    marked modules.

    For modules that choose at run time which children to run. ``chosen``: classes, names of classes (with or without
    their package) or names of modules in ``model``. ``leaf``: False marks them as no leaves, even where `leaf_marker`
    has their class or name. Call it before the model is partitioned. Raises ValueError, marking none, that names a
    choice that fits no module.
    """
    found: dict[int, nn.Module] = {}
    for choice in chosen:
        fits = [module for name, module in model.named_modules() if _is_chosen(choice, name, module)]
        if not fits:
            raise ValueError(f"set_leaf_modules: no module of the model is {choice!r}")
        found.update((id(module), module) for module in fits)
    for module in found.values():
        module.__dict__[_LEAF] = leaf
    return list(found.values())


def leaf_marker(
    classes: Iterable[str] = (), names: Iterable[str] = (), suffixes: Iterable[str] = ()
) -> Callable[[str, nn.Module], bool]:
    """Return a function of (module's name, module) that tells whether the module is a leaf, gathered together with its
    children.

    A mark of `set_leaf_modules` decides; without one, modules are leaves whose class is among ``classes`` (names, also
    of base classes), whose name is among ``names``, or whose name ends in one of ``suffixes``.
    """
    known, exact, ends = set(classes), set(names), tuple(suffixes)

    def is_leaf(name: str, module: nn.Module) -> bool:
        """Return whether ``module``, which is called ``name``, is a leaf."""
        marked = module.__dict__.get(_LEAF)
        if marked is not None:
            return bool(marked)
        kinds = {n for kind in type(module).__mro__ for n in _class_names(kind)}
        return bool(kinds & known) or name in exact or (bool(ends) and name.endswith(ends))

    return is_leaf


def _class_names(kind: type) -> tuple[str, str]:
    """Return the name of class ``kind`` without and with its package: ("Linear", "torch.nn.modules.linear.Linear")."""
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def _is_chosen(choice: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    """Return whether ``choice``, as for `set_leaf_modules`, is the class or the name of ``module``, which is called
    ``name``."""
    if isinstance(choice, str):
        return name == choice or choice in _class_names(type(module))
    return isinstance(module, choice)
