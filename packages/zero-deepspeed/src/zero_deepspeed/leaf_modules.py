"""Leaf modules, by DeepSpeed's names: stage 3 gathers a leaf's parameters together with all those inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zero_core.errors import UsageError
from zero_partition import leaf_marker, set_leaf_modules
from zero_settings import LeafModule

LeafChoice = type[nn.Module] | str


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make ``model`` a leaf module; with a false ``flag`` make it none any more. Call it before `initialize`."""
    set_leaf_modules(model, [""], leaf=flag)
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether ``model`` is a leaf module, by `set_z3_leaf_module` or the configuration."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model``, itself included, that are leaves as `z3_leaf_module` says."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def mark_configured_leaves(model: nn.Module, section: LeafModule) -> None:
    """Mark, for `get_z3_leaf_modules`, the modules of ``model`` that the configuration's ``section`` makes leaves."""
    is_leaf = leaf_marker(section.classes, section.names, section.name_suffixes)
    for name, module in model.named_modules():
        if is_leaf(name, module):
            module._z3_leaf = True


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[LeafChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make the modules in ``model`` of these classes (or class names) leaf modules; return them. Call it before
    `initialize`.

    Raises `UsageError` if there is none and ``raise_if_not_found``, and for anything but classes and names.
    """
    return _set_leaves_by_class(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[LeafChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make the modules in ``model`` of these classes (or class names) no leaf modules any more; return them. Call it
    before `initialize`.

    Raises `UsageError` if there is none and ``raise_if_not_found``, and for anything but classes and names.
    """
    return _set_leaves_by_class(model, list(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules of these full names leaf modules; return them, and the names that match none.

    ``flag``: false to make them no leaf modules any more. Raises `UsageError` if a name matches none and
    ``raise_if_not_found``. Call it before `initialize`.
    """
    known = dict(model.named_modules())
    wanted = list(module_names)
    return _set_leaves_by_name(wanted, lambda name: [known[name]] if name in known else [], flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make modules whose full names end with one of the suffixes leaf modules; return them, and the suffixes that match
    none.

    ``flag``: false to make them no leaf modules any more. Raises `UsageError` if a suffix matches none and
    ``raise_if_not_found``. Call it before `initialize`.
    """

    def ending(suffix: str) -> list[nn.Module]:
        """Return the modules whose full name ends with ``suffix``."""
        return [module for name, module in model.named_modules() if name.endswith(suffix)]

    return _set_leaves_by_name(list(module_name_suffixes), ending, flag, raise_if_not_found)


def _set_leaves_by_name(
    wanted: list[str], find: Callable[[str], list[nn.Module]], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules that ``find`` returns for the names ``wanted`` leaf modules, or with a false ``flag`` none any
    more; return (these modules, the names for which there are none).

    Raises `UsageError`, and changes nothing, if ``raise_if_not_found`` and there are no modules for some name.
    """
    found = {id(module): module for name in wanted for module in find(name)}
    missing = [name for name in wanted if not find(name)]
    if missing and raise_if_not_found:
        raise UsageError(f"no module of the model is named so: {', '.join(missing)}")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def _set_leaves_by_class(model: nn.Module, classes: list[Any], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    """Make the modules of these classes or class names leaf modules, or with a false ``flag`` none any more; return
    them. Raises `UsageError` if there is none and ``raise_if_not_found``, and for anything but classes and names."""
    for choice in classes:
        if not isinstance(choice, (str, type)):
            raise UsageError(f"leaf_module_classes: expected classes or their names, got {choice!r}")
    found = [module for module in model.modules() if any(_is_of_class(module, choice) for choice in classes)]
    if not found and raise_if_not_found:
        raise UsageError(f"no module of the model is one of {classes}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of_class(module: nn.Module, choice: LeafChoice) -> bool:
    """Return whether ``module`` is an instance of the class ``choice`` or, if that is a text, whether it is the name of
    the module's own class, short or with the name of the Python module in front.
    """
    if isinstance(choice, str):
        kind = type(module)
        return choice in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, choice)
