"""Leaf modules, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from zero_core.errors import UsageError
from zero_partition import set_leaf_modules

LeafChoice = type[nn.Module] | str


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Have ``model`` gathered as a whole (or, with a false ``flag``, not any more)."""
    set_leaf_modules(model, [""], leaf=flag)
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether ``model`` is gathered as a whole."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that are gathered as a whole."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[LeafChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have modules of these classes (or class names) gathered as a whole; return them. Before `initialize`.

    Raises `UsageError` when there is none, unless told not to.
    """
    return _mark(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[LeafChoice], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`."""
    return _mark(model, list(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Have the modules of these names gathered as a whole; return them, and the names that fit none."""
    known = dict(model.named_modules())
    wanted = list(module_names)
    return _mark_named(wanted, lambda name: [known[name]] if name in known else [], flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Have the modules whose names end so gathered as a whole; return them, and the endings that fit none."""

    def ending(suffix: str) -> list[nn.Module]:
        return [module for name, module in model.named_modules() if name.endswith(suffix)]

    return _mark_named(list(module_name_suffixes), ending, flag, raise_if_not_found)


def _mark_named(
    wanted: list[str], find: Callable[[str], list[nn.Module]], flag: bool, must: bool
) -> tuple[list[nn.Module], list[str]]:
    found = {id(module): module for name in wanted for module in find(name)}
    missing = [name for name in wanted if not find(name)]
    if missing and must:
        raise UsageError(f"no module of the model is named so: {', '.join(missing)}")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def _mark(model: nn.Module, classes: list[Any], flag: bool, must: bool) -> list[nn.Module]:
    for choice in classes:
        if not isinstance(choice, (str, type)):
            raise UsageError(f"leaf_module_classes: expected classes or their names, got {choice!r}")
    found = [module for module in model.modules() if any(_fits(module, choice) for choice in classes)]
    if not found and must:
        raise UsageError(f"no module of the model is one of {classes}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _fits(module: nn.Module, choice: LeafChoice) -> bool:
    if isinstance(choice, str):
        kind = type(module)
        return choice in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, choice)
