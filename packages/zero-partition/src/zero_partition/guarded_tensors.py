"""The classes of tensors that stand for a parameter, or a fragment of one, in an optimizer's param groups and states.

Their ``__torch_function__`` checks with a guard first; see [Note: what user code does to fragments] in
optimizer_tensors.py. A guarded tensor is one of these classes; its reference says which parameter it belongs to. A
torch function is what ``__torch_function__`` gets: ``func`` with ``args`` and ``keywords``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .errors import PartitionError
from .torch_calls import FACTS, SHAPES, attribute_of, is_elementwise, name_of, writes

REFERENCE = "_zero_fragment"  # the one attribute that a guarded tensor carries: a `FragmentReference`
_NEEDS_ALL = ("H", "T", "mH", "mT", "__cuda_array_interface__")
_RANDOM = frozenset(["rand_like", "randint_like", "randn_like"])


class TensorGuard(Protocol):
    """Decides which torch functions user code may apply to guarded tensors.

    ``split``: other ranks may hold other fragments of the parameters.
    """

    split: bool

    @property
    def is_on(self) -> bool:
        """Return whether uses are checked now; False inside the optimizer's step."""

    def used(self, reference: FragmentReference, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raise `PartitionError` if the values are not on this rank, or ``func`` would do something else to the
        fragment than to the full parameter, or have no effect.

        Called before torch function ``func`` runs with ``args`` and ``keywords``, among which is the guarded tensor of
        ``reference``.
        """


@dataclass(frozen=True)
class FragmentReference:
    """The parameter ``name``, of full shape ``shape``, of which a guarded tensor is a fragment or is computed from one.

    ``guard``: decides what user code may do with the tensor. ``is_updated``: the tensor's memory is what the optimizer
    updates; else it is a state, or a result of user code.
    """

    guard: TensorGuard
    name: str
    shape: torch.Size
    is_updated: bool


def guard_of(value: object) -> FragmentReference | None:
    """Return the reference of ``value`` to its parameter, if it is a guarded tensor; None for any other value, or if
    nothing guards it."""
    return value.fragment_reference() if isinstance(value, GuardedTensor) else None


def check_use(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[FragmentReference]:
    """Have the guards that are on check the call of torch function ``func``. Return the references of their tensors
    among its arguments, nested ones too. Raises `PartitionError` if a guard refuses the use."""
    leaves = tree_leaves((args, keywords))
    found = [one for leaf in leaves if (one := guard_of(leaf)) is not None and one.guard.is_on]
    for reference in found:
        reference.guard.used(reference, func, args, keywords)
    return found


def check_same_parameter(name: str, kind: str, value: object) -> None:
    """Raise `PartitionError` if ``value``, set as state ``kind`` of parameter ``name``, is a guarded tensor of another
    parameter."""
    reference = guard_of(value)
    if reference is not None and reference.name != name:
        raise PartitionError(
            f"optimizer.state of parameter '{name}': '{kind}' is, or was computed from, a part of parameter "
            f"'{reference.name}', of which this rank may hold other elements. Exchange full values by "
            "engine.full_state(p, kind) and engine.set_full_state(p, kind, value). The weights were not changed."
        )


def plain(value: Any) -> Any:
    """Return a plain tensor in the memory of ``value`` if that is a guarded tensor, with values of a tier read from
    there; else ``value`` itself."""
    if not isinstance(value, GuardedTensor):
        return value
    values: Any = value.detach()  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(torch.Tensor)


def written_by(call: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """Return the arguments that the torch function called ``call`` writes: its first if it works in place, and ``out``.
    None may be among them."""
    return tree_leaves([keywords.get("out"), args[0] if args and writes(call) else None])


def why_not_elementwise(
    reference: FragmentReference, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> str:
    """Return, in words, why torch function ``func`` does something else to a fragment than to the full parameter; "" if
    it does the same.

    ``reference``: of a guarded tensor among ``args`` and ``keywords``.
    """
    attribute, call = attribute_of(func), name_of(func)
    if (attribute or call) in SHAPES or (call in FACTS and call not in _RANDOM and not is_elementwise(call)):
        return ""
    if call == "__get__":
        return f"{attribute} needs the full parameter" if attribute in _NEEDS_ALL else ""
    if call in _RANDOM or call.rstrip("_") in ("normal", "uniform", "bernoulli", "exponential"):
        return f"{call}() draws random numbers for the part"
    if is_whole_view(call, args, keywords):
        return ""
    finds_places = call == "where" and len(args) + len(keywords) == 1
    is_written_alike = call == "__set__" or (call == "__setitem__" and _is_alike_at(*args[1:]))
    if finds_places or not (is_written_alike or is_elementwise(call)):
        return f"{call}() is not computed element by element"
    with torch._C.DisableTorchFunctionSubclass():
        written = {id(leaf) for leaf in written_by(call, args, keywords)}
        for operands in _operands(call, args, keywords):
            if (why := _why_not_alike(reference, operands, written)) is not None:
                return f"{attribute or call} gets {why}"
    return ""


def is_whole_view(call: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether the torch function called ``call`` returns a view of all elements in their order, flat or
    unchanged: one of ``[:]``, ``flatten()``, ``ravel()``, ``view(-1)`` and ``reshape(-1)``."""
    if call == "__getitem__":
        return _selects_all(args[1])
    if call in ("flatten", "ravel"):
        return len(args) == 1 and not keywords
    return call in ("view", "reshape") and tree_leaves(args[1:]) == [-1] and not keywords


def _selects_all(index: Any) -> bool:
    """Return whether ``index`` selects every element, as ``[:]`` and ``[...]`` do."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(one is Ellipsis or (isinstance(one, slice) and one == slice(None)) for one in parts)


def _is_alike_at(index: Any, value: Any) -> bool:
    """Return whether writing ``value`` at ``index`` does the same to a fragment as to the full parameter: it writes all
    elements, or one number at a mask."""
    is_number = not isinstance(value, torch.Tensor) or value.numel() == 1
    return _selects_all(index) or (isinstance(index, torch.Tensor) and index.dtype == torch.bool and is_number)


def _operands(call: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[list[Any]]:
    """Return the arguments that torch function ``call`` combines with each other: one list of all of them. For a
    ``_foreach_`` function there is one list per position in its lists, each with the tensors that it gets outside
    lists."""
    if not call.startswith("_foreach_"):
        return [tree_leaves((args, keywords))]
    lists = [one for one in (*args, *keywords.values()) if isinstance(one, (list, tuple))]
    single = [one for one in (*args, *keywords.values()) if isinstance(one, torch.Tensor)]
    return [[*column, *single] for column in zip(*lists, strict=False)]


def _why_not_alike(reference: FragmentReference, operands: Sequence[Any], written: set[int]) -> str | None:
    """Return, in words, which of ``operands`` does not fit a fragment of the parameter elementwise; None if all do. A
    fragment goes with others of its parameter, and with single numbers.

    ``reference``: the parameter, if none of the operands is guarded. ``written``: `id` of the tensors that the function
    writes.
    """
    tensors = [one for one in operands if isinstance(one, torch.Tensor)]
    guarded = [(one, found) for one in tensors if (found := guard_of(one)) is not None]
    own = next((found for one, found in guarded), reference)
    held = {one.shape for one, _ in guarded}
    for one in tensors:
        found = guard_of(one)
        if found is not None and found.name != own.name:
            return f"a part of parameter '{found.name}' as well, of which this rank may hold other elements"
        if found is None and id(one) in written and guarded:
            return "a tensor to write that is none of the parameter's: make it with torch.empty_like of this one"
        if found is None and one.numel() != 1 and one.shape not in held:
            return f"a tensor of shape {tuple(one.shape)} as well, which is no part of the parameter"
    return None


def shape_fact(fact: str, shape: torch.Size, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the value of ``fact``, an attribute or method in `torch_calls.SHAPES`, for a tensor of ``shape``.
    ``args``, ``keywords``: of the method, the tensor itself first."""
    with torch._C.DisableTorchFunctionSubclass():
        whole = torch.empty((), device="cpu").expand(shape)
    if fact in ("shape", "ndim"):
        return getattr(whole, fact)
    return getattr(whole, fact)(*args[1:], **keywords)


def _torch_function(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Check the use of guarded tensors by torch function ``func``, run it on plain values, and guard its result where
    that is a view or computed element by element: ``__torch_function__`` of the guarded classes.

    Inside the optimizer's step, where guards are off, ``func`` just runs. Facts such as the shape are those of the full
    parameter. Where no other rank has a fragment, only ``detach()`` and ``.data`` are guarded again. Returns
    NotImplemented for tensors that a tier keeps, whose class goes first. Raises `PartitionError` if a guard refuses.
    """
    if not all(kind in _OWN or not issubclass(kind, GuardedTensor) for kind in _types):
        return NotImplemented  # values on a tier have to be brought first
    keywords = kwargs or {}
    found = check_use(func, args, keywords)
    attribute, call = attribute_of(func), name_of(func)
    if found and (attribute or call) in SHAPES:
        return shape_fact(attribute or call, found[0].shape, args, keywords)
    if call == "__set__" and attribute == "grad":
        args = (args[0], plain(args[1]))
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **keywords)
        if not found:
            return result
        split = any(reference.guard.split for reference in found)
        is_flat = split and is_whole_view(call, args, keywords)
        if is_flat and call != "__getitem__":
            found = [dataclasses.replace(one, shape=torch.Size([one.shape.numel()])) for one in found]
        is_view = call == "detach" or (call == "__get__" and attribute in (("data", "grad") if split else ("data",)))
        if is_view or is_flat or (split and is_elementwise(call)):
            return guarded_result(result, args, found, is_view=is_view or is_flat)
    return result


def guarded_result(result: Any, args: tuple[Any, ...], found: Sequence[FragmentReference], *, is_view: bool) -> Any:
    """Return ``result``, of a torch function called with ``args``, with its tensors guarded by ``found``, the
    references (at least one) of the guarded tensors among its arguments.

    A list of results gets the references of the list ``args[0]``, position by position; anything else the first of
    ``found``. ``is_view``: ``result`` shares their memory.
    """
    if isinstance(result, (list, tuple)):
        of = args[0] if args and isinstance(args[0], (list, tuple)) else []
        own = [guard_of(one) for one in of] if len(of) == len(result) else [None] * len(result)
        return [_one_guarded(one, ref or found[0], is_view) for one, ref in zip(result, own, strict=True)]
    return _one_guarded(result, found[0], is_view)


def _one_guarded(result: Any, reference: FragmentReference, is_view: bool) -> Any:
    """Return ``result`` guarded by ``reference`` if it is a plain tensor, else as it is. ``is_view``: it shares the
    memory of the tensor that ``reference`` belongs to."""
    if type(result) is not torch.Tensor:
        return result
    values = result.as_subclass(FragmentValues)
    is_updated = is_view and reference.is_updated
    values.__dict__[REFERENCE] = FragmentReference(reference.guard, reference.name, reference.shape, is_updated)
    return values


class GuardedTensor:
    """Base of the classes of tensors whose use a guard checks."""

    def fragment_reference(self) -> FragmentReference | None:
        """Return this tensor's reference to its parameter; None if nothing guards it."""
        reference: FragmentReference | None = self.__dict__.get(REFERENCE)
        return reference


def _copy(tensor: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return a deep copy of ``tensor`` that is an unguarded parameter: ``__deepcopy__`` of `FragmentTensor`."""
    with torch._C.DisableTorchFunctionSubclass():
        memo[id(tensor)] = copied = nn.Parameter(tensor.data.clone(), tensor.requires_grad)
    return copied


def _reduce(tensor: nn.Parameter, protocol: Any) -> Any:
    """Return what pickle writes of ``tensor``: an unguarded parameter. ``__reduce_ex__`` of `FragmentTensor`."""
    with torch._C.DisableTorchFunctionSubclass():
        unguarded = nn.Parameter(tensor.data, tensor.requires_grad)
    return unguarded.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class FragmentTensor(GuardedTensor, nn.Parameter):
    """The fragment of a parameter that this rank updates, outside the optimizer's step; copies and pickles are
    parameters."""

    __torch_function__: ClassVar[Any] = classmethod(_torch_function)
    __deepcopy__ = _copy
    __reduce_ex__ = _reduce


class FragmentValues(GuardedTensor, torch.Tensor):
    """A tensor computed from a `FragmentTensor`, or an optimizer state of one, outside the optimizer's step; copies and
    pickles are plain tensors."""

    __torch_function__: ClassVar[Any] = classmethod(_torch_function)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what pickle writes: a plain tensor of the same values."""
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor with a copy of the values."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone()


_OWN = (FragmentTensor, FragmentValues)
