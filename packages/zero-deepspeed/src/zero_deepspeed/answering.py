"""The modules of the package `deepspeed`: made from the table `NAMES` when they are imported, filled name by name.

Only `deepspeed/__init__.py` and `deepspeed/__main__.py` are files; the first calls `answer`. Its submodules come from a
finder on `sys.meta_path`, so that `import deepspeed.ops.adam`, `importlib.util.find_spec`, `python -m` and pickled
references find them as they find files. A name is imported from where it is answered when it is first asked for.
"""

from __future__ import annotations

import difflib
import importlib.abc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .errors import UnsupportedError
from .names import NAMES, Unavailable

_TABLE = str(Path(__file__).with_name("names.py"))
_RUN = "import sys\n\nfrom {} import main\n\nsys.exit(main())\n"


def answer(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of ``module``, and have its submodules found by imports."""
    if not any(isinstance(finder, NameFinder) for finder in sys.meta_path):
        sys.meta_path.append(NameFinder())
    return _lookup(module), _listing(module)


class NameFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and makes the modules of `NAMES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table; None for any other."""
        if fullname not in NAMES:
            return None
        return ModuleSpec(fullname, self, origin=_TABLE, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        """Return whether the table has submodules of the module."""
        return bool(_submodules(fullname))

    def get_source(self, fullname: str) -> str | None:
        """Return what `python -m` runs: the module's ``main``; None for modules without one."""
        home = _names(fullname).get("main")
        return None if home is None else _RUN.format(home.partition(":")[0])

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names. Raises ImportError, with what to use instead, for one that is not available."""
        name = module.__name__
        instead = NAMES[name]
        if isinstance(instead, Unavailable):
            raise ImportError(f"{name} is not available in zero-deepspeed: {instead}", name=name)
        vars(module).update(
            __doc__="The module of this name in DeepSpeed; zero_deepspeed/names.py says where its names are answered.",
            __getattr__=_lookup(name),
            __dir__=_listing(name),
            __all__=[known for known in _names(name) if not known.startswith("_")],
        )
        # As in DeepSpeed, a name covers the submodule of the same name, whichever of the two is imported first.
        for covered in _names(name).keys() & _submodules(name):
            import_module(f"{name}.{covered}")
            delattr(module, covered)


def _names(module: str) -> Mapping[str, str | Unavailable]:
    names = NAMES[module]
    return {} if isinstance(names, Unavailable) else names


def _submodules(module: str) -> set[str]:
    return {name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == module}


def _lookup(module: str) -> Callable[[str], Any]:
    def getattribute(name: str) -> Any:
        value = _value(module, name)
        setattr(sys.modules[module], name, value)
        return value

    return getattribute


def _value(module: str, name: str) -> Any:
    names = _names(module)
    if name not in names:
        submodule = f"{module}.{name}"
        instead = NAMES.get(submodule)
        if instead is None or isinstance(instead, Unavailable):
            raise AttributeError(_unknown(module, name, [*names, *_submodules(module)], instead))
        return import_module(submodule)
    home = names[name]
    if isinstance(home, Unavailable):
        return _refusing(module, name, home)
    place, colon, attribute = home.partition(":")
    found = import_module(place)
    return getattr(found, attribute or name) if colon else found


def _listing(module: str) -> Callable[[], list[str]]:
    def listing() -> list[str]:
        answered = [name for name, home in _names(module).items() if not isinstance(home, Unavailable)]
        submodules = [name for name in _submodules(module) if not isinstance(NAMES[f"{module}.{name}"], Unavailable)]
        return sorted({*vars(sys.modules[module]), *answered, *submodules})

    return listing


def _refusing(module: str, name: str, instead: str) -> type:
    """A class that raises when it is called, so that importing it and isinstance work."""

    def refuse(_class: type, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{module}.{name} is not available in zero-deepspeed: {instead}")

    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": f"Not available: {instead}."})


def _unknown(module: str, name: str, known: Iterable[str], instead: str | None) -> str:
    if instead is not None:
        return f"{module}.{name} is not available in zero-deepspeed: {instead}"
    dunder = name.startswith("__")  # asked for by the interpreter and by tools, often, and never mistyped
    nearest = [] if dunder else difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"module {module!r}, as zero-deepspeed answers it, has no attribute {name!r}{hint}"
