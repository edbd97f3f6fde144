"""The class that a parameter has while it is released: torch functions that need its values ask for them first.

[Note: the class of a released parameter] A placeholder reads NaN, and nobody notices before the loss does. So release
gives a parameter a subclass of its own class, and gather takes it away again, as torch does with its lazy parameters.
torch calls ``__torch_function__`` of that subclass before it computes: facts such as ``shape`` are answered from the
placeholder, anything else asks the runtime, which gathers the unit or raises by name. ``p.data`` and ``p.detach()``
give tensors that do the same. A gathered parameter has its own class: computing with it costs what it costs in torch.
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
from .torch_calls import FACTS, VIEWS, attribute_of, name_of, writes

_PRESENT = "_zero_present_class"
WATCHED = "_zero_watched_class"  # of a class of data_watch.py: the user's class that it stands for
_SHAPED_LIKE = frozenset("expand_as reshape_as type_as view_as".split())
_FORMAT = "memory_format"
_PARAMETER = "torch.nn.parameter"
_CASTS = frozenset("bfloat16 cpu cuda double float half to type".split())


class ReleasedValues(torch.Tensor):
    """The tensor that ``data`` and ``detach()`` of a released parameter give: it computes with the values that the
    parameter has then. Pickles of it are plain tensors of NaN.

    Attributes:
        parameter: whose values these are.
    """

    parameter: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Ask for the values before ``func`` computes with them."""
        return _call(cls, func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if find_owner(self.parameter) is None and init_record(self.parameter) is not None:
            _ask(self, "a pickle", writes=False)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.parameter, memo).detach()


def mark_released(parameters: Sequence[nn.Parameter]) -> None:
    """Have torch functions ask for the values of ``parameters``, which are placeholders now."""
    exchange_classes(parameters, _released_class)


def mark_present(parameters: Sequence[nn.Parameter]) -> None:
    """Give ``parameters`` their own classes back: their values are here."""
    exchange_classes(parameters, _present_class)


def is_released(parameter: nn.Parameter) -> bool:
    """Return True when torch functions ask for the values of ``parameter``."""
    return hasattr(type(parameter), _PRESENT)


def unwatched(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The user's class of a parameter that has ``kind`` now, released, watched, both or none."""
    present = _present_class(kind)
    found: type[nn.Parameter] = getattr(present, WATCHED, present)
    return found


def released_like(kind: type[nn.Parameter], present: type[nn.Parameter]) -> type[nn.Parameter]:
    """``present``, or where ``kind`` is the class of released parameters, the one that released parameters of
    ``present`` have."""
    return _released_class(present) if hasattr(kind, _PRESENT) else present


@functools.cache
def _present_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    present: type[nn.Parameter] = getattr(kind, _PRESENT, kind)
    return present


@functools.cache
def _released_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    if hasattr(kind, _PRESENT):
        return kind
    body = {"__torch_function__": classmethod(_call), "__module__": __name__, _PRESENT: kind}
    if kind.detach is torch.Tensor.detach:
        body["detach"] = detached
    copies = unwatched(kind).__deepcopy__
    body["__deepcopy__"] = _copy_with_values if copies is nn.Parameter.__deepcopy__ else copies
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(f"Released{kind.__name__}", (kind,), body)
    return made


def detached(parameter: nn.Parameter) -> torch.Tensor:
    """``parameter.detach()`` for classes of parameters that are the engine's."""
    values = torch.Tensor.detach(parameter)
    if torch.compiler.is_compiling():
        return values
    if sys._getframe(1).f_globals.get("__name__") == _PARAMETER:  # nn.Parameter(p) wants a tensor of p's own class
        values = values.as_subclass(type(parameter))
    return values


def _call(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a torch function some of whose arguments are released."""
    keywords = kwargs or {}
    if func is torch.autograd.grad:
        return func(*_by_gradient_edge(args), **dict(zip(keywords, _by_gradient_edge(keywords.values()), strict=True)))
    report_gradient_access(func, args)
    name = name_of(func)
    if name == "__set__" and attribute_of(func) == "data" and not _holds(args[1]):
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
        if not _holds(value):
            return value
        return _ask(value, name, writes=any(value is target for target in written))

    args, keywords = tree_map(with_values, (args, keywords))
    return func(*args, **keywords)


def report_gradient_access(func: Any, args: Sequence[Any]) -> None:
    """Tell the engine of a parameter what is done to its ``grad``; anything else is not reported."""
    if getattr(func, "__self__", None) is not torch.Tensor.grad or not isinstance(args[0], nn.Parameter):
        return
    if (owner := find_owner(args[0])) is None:
        return
    if name_of(func) == "__get__":
        owner.gradient_accessed(args[0], "read")
    else:
        owner.gradient_accessed(args[0], "cancelled" if len(args) < 2 or args[1] is None else "written")


def _parameter_of(value: object) -> nn.Parameter | None:
    """The parameter that has to be gathered before torch computes with ``value``."""
    if isinstance(value, ReleasedValues):
        return value.parameter
    return value if isinstance(value, nn.Parameter) and hasattr(type(value), _PRESENT) else None


def _holds(value: object) -> bool:
    return _parameter_of(value) is not None


def _needs_no_values(func: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if name == "__get__":
        return attribute_of(func) not in VIEWS
    if name == "__set__":
        return not _holds(args[1]) or args[1] is args[0] or _parameter_of(args[1]) is _parameter_of(args[0])
    if name in _CASTS:
        return _changes_nothing(name, args, keywords)
    if name in _SHAPED_LIKE:  # of itself: how torch finds the node that accumulates
        return not _holds(args[0]) or args[0] is args[1]
    return name in FACTS or name == "detach"


def _changes_nothing(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether a cast gives the tensor itself, as ``module.to`` of the present dtype and device does, or needs
    only the dtype of a released argument. A memory format changes nothing: a unit's parameters are contiguous."""
    if not _holds(args[0]):
        return True
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty([1] * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
        getattr(like, name)(*args[1:], **keywords)  # raises what torch has against the format
        cast = getattr(like, name)(*args[1:], **_without_format(keywords))
    return cast is like or not isinstance(cast, torch.Tensor)


def _without_format(keywords: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if key != _FORMAT}


def _by_gradient_edge(arguments: Any) -> list[Any]:
    """The arguments of `torch.autograd.grad` with the place of a released parameter in the graph for itself."""

    def edge(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(edge(item) for item in value)
        return get_gradient_edge(value) if isinstance(value, nn.Parameter) and _holds(value) else value

    return [edge(argument) for argument in arguments]


def _copy_with_values(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A deep copy of a released parameter, with its values; of one that no engine owns yet, sharded like it. Collective
    outside passes of an engine."""
    if id(parameter) not in memo:
        owner, record = find_owner(parameter), init_record(parameter)
        if owner is None and record is not None:
            memo[id(parameter)] = record.twin(unwatched(type(parameter)))
        elif owner is None or not owner.gathers_for_copies(parameter):
            values = _ask(parameter, "deepcopy", writes=False)
            memo[id(parameter)] = unwatched(type(parameter))(values.detach().clone(), parameter.requires_grad)
        else:
            with owner.unsharded(parameter):
                memo[id(parameter)] = copy.deepcopy(parameter, memo)
    copied: nn.Parameter = memo[id(parameter)]
    return copied


def _without_engine(parameter: nn.Parameter, call: str) -> ReleasedParameterError:
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
def _ask(value: Any, call: str, *, writes: bool) -> torch.Tensor:
    """Return what to compute with in the place of ``value``; raises `ReleasedParameterError` where its values cannot
    come."""
    parameter: Any = _parameter_of(value)
    owner = find_owner(parameter)
    if owner is not None:
        owner.values_used(parameter, call, writes=writes)
    elif hasattr(type(parameter), _PRESENT):
        raise _without_engine(parameter, call)
    given: torch.Tensor = parameter
    with torch._C.DisableTorchFunctionSubclass():
        if parameter is not value:
            given = parameter.detach()
        elif hasattr(type(parameter), _PRESENT):
            given = parameter.view_as(parameter)
    return given
