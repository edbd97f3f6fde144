"""The class of an engine's parameters, by which the engine finds writes through ``p.data``.

[Note: writes through .data] In torch ``p.data`` is an alias of the parameter with a version counter of its own, so a
write through it leaves no trace on the parameter. An engine's parameters have a subclass of their own class, the
watching class. Its ``data`` returns aliases that share the version counter of one alias, which the unit keeps: that
counter shows every write, also one through an alias that code has kept. torch functions ignore the subclass, so
computing costs what it costs in torch. ``data`` of a released parameter is handled in released.py. In a compiled region
``data`` is ``detach()``, which shares the parameter's own version counter.

The user's class of a parameter is the one that it has when gathered and without an engine. The owner of a parameter is
the engine's `Partition`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .ownership import find_owner, without_owner
from .released import WATCHED, detached, is_released, released_like, unwatched

_DATA: Any = torch.Tensor.data
_DISABLED = torch._C._disabled_torch_function_impl


def watch_data(parameter: nn.Parameter) -> None:
    """Give ``parameter`` a class whose ``data`` lets its owner find writes; do nothing if the user's class has a
    ``__torch_function__`` of its own. A released parameter stays released."""
    kind = present_class(parameter)
    if kind.__torch_function__ is _DISABLED:
        parameter.__class__ = released_like(type(parameter), _watching_class(kind))


def unwatch_data(parameter: nn.Parameter) -> None:
    """Undo `watch_data`: give ``parameter`` the user's class again; a released one stays released."""
    parameter.__class__ = released_like(type(parameter), present_class(parameter))


def present_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the user's class of ``parameter``: the one that it has when gathered and not watched by an engine."""
    return unwatched(type(parameter))


def change_class(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Make ``kind`` the user's class of ``parameter``, in place; a released one stays released, a watched one
    watched."""
    watched = hasattr(type(parameter), WATCHED)
    parameter.__class__ = released_like(type(parameter), _watching_class(kind) if watched else kind)


@functools.cache
def _watching_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the subclass of ``kind`` whose ``data`` lets the owner find writes; copies and pickles of its parameters
    are of class ``kind``."""
    body = {
        "data": property(_get_data, _set_data),
        "detach": detached,
        "__deepcopy__": _copy_unwatched,
        "__reduce_ex__": _reduce_unwatched,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        WATCHED: kind,
    }
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(kind.__name__, (kind,), body)
    return made


def _get_data(parameter: nn.Parameter) -> torch.Tensor:
    """Return what ``parameter.data`` gives: an alias by which the owner finds writes (see [Note: writes through
    .data]). Torch's own alias without an owner or while the parameter is released; ``detach()`` inside
    torch.compile."""
    if torch.compiler.is_compiling():
        return torch.Tensor.detach(parameter)
    data: torch.Tensor = _DATA.__get__(parameter)
    owner = None if is_released(parameter) else find_owner(parameter)
    return data if owner is None else owner.lend_data(parameter, data)


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Set ``parameter.data`` to ``data``, as torch does."""
    _DATA.__set__(parameter, data)


def _reduce_unwatched(parameter: nn.Parameter, protocol: Any) -> Any:
    """Return what pickle writes of ``parameter``: a parameter of the user's class, without its owner. ``__reduce_ex__``
    of the watching classes."""
    kind = present_class(parameter)
    if kind.__reduce_ex__ is not nn.Parameter.__reduce_ex__:
        return kind.__reduce_ex__(parameter, protocol)  # type: ignore[no-untyped-call]
    with torch._C.DisableTorchFunctionSubclass():
        plain = nn.Parameter(parameter.data, parameter.requires_grad)
    plain.__dict__.update(without_owner(parameter))
    return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _copy_unwatched(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return a deep copy of ``parameter`` of the user's class, without an owner: ``__deepcopy__`` of the watching
    classes."""
    watching, parameter.__class__ = type(parameter), present_class(parameter)
    try:
        copied: nn.Parameter = parameter.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copied
    finally:
        parameter.__class__ = watching
