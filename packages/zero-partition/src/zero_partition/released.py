"""The class that a parameter has while it is released, which gathers it before torch functions use its values.

[Note: the class of a released parameter] A placeholder reads NaN, which would go unnoticed until the loss is NaN. So
release gives a parameter a subclass of its own class (a released class), and gather restores its class, as torch does
with its lazy parameters. torch calls ``__torch_function__`` of that subclass before it computes: facts such as
``shape`` are read from the placeholder; anything that needs values gathers the unit or raises. ``p.data`` and
``p.detach()`` are tensors that do the same. A gathered parameter has its own class, so it computes without overhead.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map

from .dispatch_modes import outside_modes
from .errors import ReleasedParameterError
from .host_facts import exchange_classes, is_fake
from .ownership import find_owner, init_record
from .torch_calls import FACTS, attribute_of, name_of, reads_values, writes

_PRESENT = "_zero_present_class"  # attribute of a class of released parameters: their class while gathered
WATCHED = "_zero_watched_class"  # attribute of a class made by data_watch.py: the user's class that it stands for
_SHAPED_LIKE = frozenset("expand_as reshape_as type_as view_as".split())
_FORMAT = "memory_format"
_PARAMETER = "torch.nn.parameter"
_CASTS = frozenset("bfloat16 cpu cuda double float half to type".split())


class ReleasedValues(torch.Tensor):
    """The tensor that ``data`` and ``detach()`` of a released parameter return.

    Torch functions compute with the values that the parameter has when they are called, and pickles hold them.

    Attributes:
        parameter: the parameter whose values these are.
    """

    parameter: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gather the parameter before ``func`` computes with its values; raise `ReleasedParameterError`, naming the
        parameter, if it cannot be gathered."""
        return _call_gathered(cls, func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Gather the parameter and return what pickle writes: a plain tensor with its values. Raises
        `ReleasedParameterError` if the parameter cannot be gathered."""
        values = _gathered_value(self, "pickle", writes=False)
        return values.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return ``detach()`` of a deep copy of the parameter."""
        return copy.deepcopy(self.parameter, memo).detach()


def mark_released(parameters: Sequence[nn.Parameter]) -> None:
    """Give ``parameters`` their released classes, whose torch functions gather them before use; their values do not
    change."""
    exchange_classes(parameters, _released_class)


def mark_present(parameters: Sequence[nn.Parameter]) -> None:
    """Give ``parameters`` back the classes that they have while gathered; their values do not change."""
    exchange_classes(parameters, _present_class)


def is_released(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` has a released class now."""
    return hasattr(type(parameter), _PRESENT)


def unwatched(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the user's own class of a parameter whose class is ``kind`` now, which may be a subclass that release or
    the watch of ``data`` (data_watch.py) has made."""
    present = _present_class(kind)
    found: type[nn.Parameter] = getattr(present, WATCHED, present)
    return found


def released_like(kind: type[nn.Parameter], present: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return ``present``, a class of gathered parameters, or its released class if ``kind`` is a released class."""
    return _released_class(present) if hasattr(kind, _PRESENT) else present


@functools.cache
def _present_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that parameters of the released class ``kind`` have while gathered; ``kind`` itself if it is not
    a released class."""
    present: type[nn.Parameter] = getattr(kind, _PRESENT, kind)
    return present


@functools.cache
def _released_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the released class for parameters of class ``kind``, a subclass of it that is made once; ``kind`` itself
    if it is a released class."""
    if hasattr(kind, _PRESENT):
        return kind
    body = {"__torch_function__": classmethod(_call_gathered), "__module__": __name__, _PRESENT: kind}
    if kind.detach is torch.Tensor.detach:
        body["detach"] = detached
    copies = unwatched(kind).__deepcopy__
    body["__deepcopy__"] = _copy_with_values if copies is nn.Parameter.__deepcopy__ else copies
    body["__reduce_ex__"] = _pickle_with_values
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(f"Released{kind.__name__}", (kind,), body)
    return made


def detached(parameter: nn.Parameter) -> torch.Tensor:
    """Return ``parameter.detach()`` as a plain tensor; the ``detach`` method of the classes that the engine gives
    parameters.

    Only `nn.Parameter(p)`, which calls it too, gets a tensor of ``p``'s own class, which it expects.
    """
    values = torch.Tensor.detach(parameter)
    if torch.compiler.is_compiling():
        return values
    if sys._getframe(1).f_globals.get("__name__") == _PARAMETER:  # nn.Parameter(p) wants a tensor of p's own class
        values = values.as_subclass(type(parameter))
    return values


def _call_gathered(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call torch function ``func`` with the gathered values in place of released parameters, or with placeholders if it
    needs no values; return its result. The ``__torch_function__`` of released classes.

    Reports uses of ``grad`` to the parameter's owner. The results of ``data`` and ``detach()`` become `ReleasedValues`;
    a parameter whose ``data`` is set gets its own class back. Raises `ReleasedParameterError` for a parameter that
    cannot be gathered.
    """
    keywords = kwargs or {}
    if func is torch.autograd.grad:
        return func(
            *_with_gradient_edges(args), **dict(zip(keywords, _with_gradient_edges(keywords.values()), strict=True))
        )
    report_gradient_access(func, args)
    name = name_of(func)
    if name == "__set__" and attribute_of(func) == "data" and not _is_released_value(args[1]):
        mark_present([args[0]])  # from now on it has the values that it was given
    if _needs_no_values(func, name, args, keywords):
        keywords = _without_format(keywords) if name in _CASTS else keywords
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **keywords)
            parameter = None if is_fake(result) or not args else _parameter_of(args[0])
            if parameter is not None and (name == "detach" or (name == "__get__" and attribute_of(func) == "data")):
                result = result.as_subclass(ReleasedValues)
                result.parameter = parameter
            return result
    target = args[0] if args else keywords.get("tensor", keywords.get("input"))
    written = [keywords.get("out"), target if writes(name) else None]

    def with_values(value: Any) -> Any:
        """Return the gathered tensor in place of a released parameter or `ReleasedValues`; any other value as it is."""
        if not _is_released_value(value):
            return value
        return _gathered_value(value, name, writes=any(value is target for target in written))

    args, keywords = tree_map(with_values, (args, keywords))
    return func(*args, **keywords)


def report_gradient_access(func: Any, args: Sequence[Any]) -> None:
    """Report to the parameter's owner that torch function ``func`` is about to read, set or delete ``grad``; do nothing
    for other functions.

    ``args``: the function's arguments, the parameter first. The owner may raise `PartitionError`.
    """
    if getattr(func, "__self__", None) is not torch.Tensor.grad or not isinstance(args[0], nn.Parameter):
        return
    if (owner := find_owner(args[0])) is None:
        return
    if name_of(func) == "__get__":
        owner.gradient_accessed(args[0], "read")
    else:
        owner.gradient_accessed(args[0], "cancelled" if len(args) < 2 or args[1] is None else "written")


def _parameter_of(value: object) -> nn.Parameter | None:
    """Return ``value`` if it is a released parameter, or the parameter whose values it shows if it is a
    `ReleasedValues`; None for any other object."""
    if isinstance(value, ReleasedValues):
        return value.parameter
    return value if isinstance(value, nn.Parameter) and hasattr(type(value), _PRESENT) else None


def _is_released_value(value: object) -> bool:
    """Return whether ``value`` is a released parameter or a `ReleasedValues`."""
    return _parameter_of(value) is not None


def _needs_no_values(func: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether a torch function gives the right result with placeholders, so that nothing need be gathered.

    ``name``: of the function ``func``. ``args``, ``keywords``: its arguments, among them released parameters.
    """
    if name == "__get__":
        return not reads_values(attribute_of(func), args[0])
    if name == "__set__":
        return not _is_released_value(args[1]) or args[1] is args[0] or _parameter_of(args[1]) is _parameter_of(args[0])
    if name in _CASTS:
        return _returns_itself(name, args, keywords)
    if name in _SHAPED_LIKE:  # of itself: how torch finds the node that accumulates
        return not _is_released_value(args[0]) or args[0] is args[1]
    return name in FACTS or name == "detach"


def _returns_itself(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether a cast would return the released parameter itself (``to`` its present dtype and device), or no
    tensor; True if the first argument is no released parameter.

    ``name``: of the cast. ``args``, ``keywords``: its arguments. The cast is tried on a stand-in of one element. A
    memory format changes nothing, as a unit's parameters are contiguous. Raises what torch raises for such a cast.
    """
    if not _is_released_value(args[0]):
        return True
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty([1] * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
        getattr(like, name)(*args[1:], **keywords)  # raises what torch has against the format
        cast = getattr(like, name)(*args[1:], **_without_format(keywords))
    return cast is like or not isinstance(cast, torch.Tensor)


def _without_format(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``keywords`` without ``memory_format``."""
    return {key: value for key, value in keywords.items() if key != _FORMAT}


def _with_gradient_edges(arguments: Any) -> list[Any]:
    """Return the ``arguments`` of `torch.autograd.grad` as a list in which gradient edges, which need no values, stand
    for released parameters, also inside lists and tuples."""

    def edge(value: Any) -> Any:
        """Return ``value`` with each released parameter, also inside lists and tuples, replaced by its gradient
        edge."""
        if isinstance(value, (list, tuple)):
            return type(value)(edge(item) for item in value)
        return get_gradient_edge(value) if isinstance(value, nn.Parameter) and _is_released_value(value) else value

    return [edge(argument) for argument in arguments]


def _copy_with_values(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return a deep copy of a released parameter: a gathered one of the user's class, or a released one if `Init` has
    sharded ``parameter`` and no engine owns it yet.

    The ``__deepcopy__`` of released classes; ``memo`` is deepcopy's. Collective outside passes of an engine. Raises
    `ReleasedParameterError` if the parameter cannot be gathered.
    """
    if id(parameter) not in memo:
        owner, record = find_owner(parameter), init_record(parameter)
        if owner is None and record is not None:
            memo[id(parameter)] = record.released_copy(unwatched(type(parameter)))
        elif owner is None or not owner.gathers_for_copies(parameter):
            values = _gathered_value(parameter, "deepcopy", writes=False)
            memo[id(parameter)] = unwatched(type(parameter))(values.detach().clone(), parameter.requires_grad)
        else:
            with owner.unsharded(parameter):
                memo[id(parameter)] = copy.deepcopy(parameter, memo)
    copied: nn.Parameter = memo[id(parameter)]
    return copied


def _pickle_with_values(parameter: nn.Parameter, protocol: Any) -> Any:
    """Gather a released parameter and return what pickle writes of it, or raise `ReleasedParameterError` if it cannot
    be gathered. The ``__reduce_ex__`` of released classes."""
    _gathered_value(parameter, "pickle", writes=False)
    return unwatched(type(parameter)).__reduce_ex__(parameter, protocol)  # type: ignore[no-untyped-call]


def _no_engine_error(parameter: nn.Parameter, call: str) -> ReleasedParameterError:
    """Return the error for a released parameter that no engine owns, of which torch function ``call`` (its name) needs
    the values."""
    record = init_record(parameter)
    if record is None:
        return ReleasedParameterError(
            f"{call}() was called with a released parameter of shape {tuple(parameter.shape)} whose engine was "
            "destroyed with unshard=False. Give its model to zero_core.initialize again."
        )
    return ReleasedParameterError(
        f"{call}() was called with parameter '{record.name}', which was built inside Init: its values are spread over "
        "the ranks. Give the model to zero_core.initialize first, or open "
        "`with zero_core.gathered(model.parameters())` around this on every rank; to change it, with modifier_rank=0."
    )


@outside_modes  # whether a use meets a released parameter may differ between forward and its recomputation
def _gathered_value(value: Any, call: str, *, writes: bool) -> torch.Tensor:
    """Gather a released parameter for torch function ``call`` (its name), and return the tensor to compute with.

    ``value``: the released parameter, or a `ReleasedValues` of it. The result is a view of the parameter, detached for
    `ReleasedValues`, or the parameter itself if it has its own class again. ``writes``: the function writes it. Raises
    `ReleasedParameterError` if the parameter cannot be gathered.
    """
    parameter: Any = _parameter_of(value)
    owner = find_owner(parameter)
    if owner is not None:
        owner.values_used(parameter, call, writes=writes)
    elif hasattr(type(parameter), _PRESENT):
        raise _no_engine_error(parameter, call)
    given: torch.Tensor = parameter
    with torch._C.DisableTorchFunctionSubclass():
        if parameter is not value:
            given = parameter.detach()
        elif hasattr(type(parameter), _PRESENT):
            given = parameter.view_as(parameter)
    return given
