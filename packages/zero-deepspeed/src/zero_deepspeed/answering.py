"""The modules of the package `deepspeed`: created from the table `NAMES` when they are imported.

Only `deepspeed/__init__.py` and `deepspeed/__main__.py` are files; the first calls `answer`. A finder on
`sys.meta_path` creates the submodules, so that `import deepspeed.ops.adam`, `importlib.util.find_spec`, `python -m` and
pickled references find them as they find files. The object behind a name is imported at the first access.
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
_MAIN_SOURCE = "import sys\n\nfrom {} import main\n\nsys.exit(main())\n"


def answer(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return functions for `__getattr__` and `__dir__` of ``module``, a name in the table, and install the finder of
    submodules.

    The finder is appended to `sys.meta_path`, once for the process.
    """
    if not any(isinstance(finder, NameFinder) for finder in sys.meta_path):
        sys.meta_path.append(NameFinder())
    return _getattr_function(module), _dir_function(module)


class NameFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and creates the modules of `NAMES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module ``fullname`` if the table has it; None for any other. The other arguments, part
        of Python's interface for finders, are not read."""
        if fullname not in NAMES:
            return None
        return ModuleSpec(fullname, self, origin=_TABLE, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        """Return whether the table has submodules of the module ``fullname``."""
        return bool(_submodules_of(fullname))

    def get_source(self, fullname: str) -> str | None:
        """Return Python source that runs the module's function ``main``, for `python -m`; None for modules without
        one."""
        home = _names_of(fullname).get("main")
        return None if home is None else _MAIN_SOURCE.format(home.partition(":")[0])

    def exec_module(self, module: ModuleType) -> None:
        """Define the module's attributes: its docstring, `__getattr__`, `__dir__` and `__all__`.

        Raises ImportError, with the alternative, if the table says that it is not available.
        """
        name = module.__name__
        instead = NAMES[name]
        if isinstance(instead, Unavailable):
            raise ImportError(f"{name} is not available in zero-deepspeed: {instead}", name=name)
        vars(module).update(
            __doc__="The module of this name in DeepSpeed; zero_deepspeed/names.py says where its names are answered.",
            __getattr__=_getattr_function(name),
            __dir__=_dir_function(name),
            __all__=[known for known in _names_of(name) if not known.startswith("_")],
        )
        # As in DeepSpeed, a name covers the submodule of the same name, whichever of the two is imported first.
        for covered in _names_of(name).keys() & _submodules_of(name):
            import_module(f"{name}.{covered}")
            delattr(module, covered)


def _names_of(module: str) -> Mapping[str, str | Unavailable]:
    """Return the module's names from the table, each with where it is answered (`names.py` has the forms); empty if the
    module is not available."""
    names = NAMES[module]
    return {} if isinstance(names, Unavailable) else names


def _submodules_of(module: str) -> set[str]:
    """Return the last parts of the names of the module's direct submodules in the table, available or not."""
    return {name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == module}


def _getattr_function(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which resolves a name once and stores it in the module."""

    def getattribute(name: str) -> Any:
        """Return the object that answers ``name``, and store it in the module. Raises AttributeError for an unknown
        name."""
        value = _resolve(module, name)
        setattr(sys.modules[module], name, value)
        return value

    return getattribute


def _resolve(module: str, name: str) -> Any:
    """Return the object, or the submodule, that answers a name; for one that is not available a class that refuses to
    be called. Raises AttributeError, with a hint, for an unknown one."""
    names = _names_of(module)
    if name not in names:
        submodule = f"{module}.{name}"
        instead = NAMES.get(submodule)
        if instead is None or isinstance(instead, Unavailable):
            raise AttributeError(_unknown_name_message(module, name, [*names, *_submodules_of(module)], instead))
        return import_module(submodule)
    home = names[name]
    if isinstance(home, Unavailable):
        return _refusing_class(module, name, home)
    place, colon, attribute = home.partition(":")
    found = import_module(place)
    return getattr(found, attribute or name) if colon else found


def _dir_function(module: str) -> Callable[[], list[str]]:
    """Return a module's `__dir__`, which lists available names and submodules."""

    def listing() -> list[str]:
        """Return the names that are available, sorted."""
        answered = [name for name, home in _names_of(module).items() if not isinstance(home, Unavailable)]
        submodules = [name for name in _submodules_of(module) if not isinstance(NAMES[f"{module}.{name}"], Unavailable)]
        return sorted({*vars(sys.modules[module]), *answered, *submodules})

    return listing


def _refusing_class(module: str, name: str, instead: str) -> type:
    """Return a class whose call raises `UnsupportedError`, so that importing the name and isinstance still work.

    ``instead``: the advice of the error.
    """

    def refuse(_class: type, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise `UnsupportedError` where an object of the class would be made."""
        raise UnsupportedError(f"{module}.{name} is not available in zero-deepspeed: {instead}")

    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": f"Not available: {instead}."})


def _unknown_name_message(module: str, name: str, known: Iterable[str], instead: str | None) -> str:
    """Return the text of an AttributeError: with the alternative ``instead`` (None: there is
    none), or the most similar name of ``known``."""
    if instead is not None:
        return f"{module}.{name} is not available in zero-deepspeed: {instead}"
    dunder = name.startswith("__")  # asked for by the interpreter and by tools, often, and never mistyped
    nearest = [] if dunder else difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"module {module!r}, as zero-deepspeed answers it, has no attribute {name!r}{hint}"
