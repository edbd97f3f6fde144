"""How a module of names is made: each name is looked up when it is first used, and what is not supported says so."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn

from zero_core.errors import UsageError


class UnsupportedError(UsageError, NotImplementedError):
    """A name of DeepSpeed that is not answered here; the message says what to use."""


def names(
    module: str, found: Mapping[str, str], refused: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of ``module``.

    ``found``: name -> "module" or "module:attribute" that it stands for. ``refused``: name -> what to use instead; such
    a name is a class that raises `UnsupportedError` when it is called, so that importing it and isinstance work.
    """
    without = refused or {}

    def getattribute(name: str) -> Any:
        value: Any
        if name in found:
            home, _, attribute = found[name].partition(":")
            value = import_module(home)
            for part in filter(None, attribute.split(".")):
                value = getattr(value, part)
        elif name in without:
            value = _refusing(module, name, without[name])
        else:
            raise AttributeError(_unknown(module, name, [*found, *without]))
        setattr(sys.modules[module], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module]), *found})

    return getattribute, listing


def refuse_module(name: str, instead: str) -> NoReturn:
    """Raise the ImportError of a module that has no counterpart; ``instead``: what to use."""
    raise ImportError(f"{name} is not available in zero_core.as_deepspeed: {instead}", name=name)


def _refusing(module: str, name: str, instead: str) -> type:
    def refuse(_class: type, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{module}.{name} is not available in zero_core.as_deepspeed: {instead}")

    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": f"Not available: {instead}."})


def _unknown(module: str, name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"module {module!r}, as zero_core.as_deepspeed answers it, has no attribute {name!r}{hint}"
