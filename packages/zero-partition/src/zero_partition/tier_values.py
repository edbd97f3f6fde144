"""Tensors that show values of an optimizer's states on a tier; see [Note: states on a tier] in tier_states.py.

A window is host memory that mirrors a value on the tier: it is brought up to date before torch functions read it, and
written to the tier after they write it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .errors import PartitionError
from .guarded_tensors import FragmentReference, GuardedTensor, check_use, guarded_result, shape_fact
from .torch_calls import SHAPES, attribute_of, is_elementwise, name_of, writes


class ShownState(Protocol):
    """One fragment's state on a tier, as a `TierWindow` uses it; `TierState` is one."""

    @property
    def name(self) -> str:
        """The parameter's name."""

    @property
    def reference(self) -> FragmentReference | None:
        """The guard's reference (the parameter's name and full shape) for tensors of this state; None if nothing guards
        them."""

    def is_current_window(self, window: TierWindow) -> bool:
        """Return whether ``window`` is still this state's window on its kind: False once that kind was assigned again
        or cleared. Its memory may be out of date even then; see `version`."""

    def version(self) -> tuple[int, int]:
        """Return (writes to the tier, steps of the fragment): a pair that differs from an earlier one if the tier may
        have other values since."""

    def read(self, kind: str) -> torch.Tensor:
        """Return a copy of the tier's present value of ``kind``: 1-D, or 0-D for a number such as ``step``."""

    def write(self, state: dict[str, Any]) -> None:
        """Write the values in ``state`` (by kind) to the tier; kinds that are not given stay."""

    def store_assigned(self) -> None:
        """Copy to the tier again each tensor that user code has assigned to this state and written since."""


class TierWindow:
    """Host memory that mirrors the value of one ``kind`` ("step" or a moment) of the `TierState` ``state``.

    ``values``: that memory, in the fragment's shape, with the tier's present values. Once the state has another window
    on its kind, or none, this one is disconnected and keeps its values.
    """

    def __init__(self, state: ShownState, kind: str, values: torch.Tensor) -> None:
        self.state, self.kind, self.values = state, kind, values
        self._version = state.version()

    def show(self, alias: torch.Tensor, *, is_guarded: bool = True) -> TierValue:
        """Return ``alias``, a tensor in this window's memory, as a `TierValue` for user code. ``is_guarded``: the
        optimizer's guard checks its uses."""
        shown = alias.as_subclass(TierValue)
        shown.window, shown.is_guarded = self, is_guarded
        return shown

    def is_shown_by(self, value: Any) -> bool:
        """Return whether ``value`` is the tensor of all of this window, not only a view of a part."""
        return isinstance(value, TierValue) and value.window is self and plain_value(value).is_set_to(self.values)

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` shares this window's memory."""
        return tensor.untyped_storage().data_ptr() == self.values.untyped_storage().data_ptr()

    def refresh(self) -> None:
        """Copy the tier's values into this memory if they may have changed; do nothing once the window is
        disconnected."""
        self.state.store_assigned()
        if self._version != self.state.version() and self.state.is_current_window(self):
            self.values.copy_(self.state.read(self.kind).view_as(self.values))
            self._version = self.state.version()

    def write_back(self) -> None:
        """Write this memory's values to the tier; do nothing once the window is disconnected."""
        if self.state.is_current_window(self):
            self.state.write({self.kind: self.values})
            self._version = self.state.version()


def _call_on_tier(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run torch function ``func`` on the tier's present values, write to the tier what it wrote, and return its result.
    `TierValue`'s ``__torch_function__``.

    Results in a window's memory are `TierValue`s too. Raises `PartitionError` for a use that the guard refuses and for
    functions that would exchange the memory.
    """
    keywords, call = kwargs or {}, name_of(func)
    found = check_use(func, args, keywords)
    if found and (fact := attribute_of(func) or call) in SHAPES:
        return shape_fact(fact, found[0].shape, args, keywords)
    values = [value for value in tree_leaves((args, keywords)) if isinstance(value, TierValue)]
    windows = list({value.window: None for value in values})
    if call in ("set_", "resize_") or (call == "__set__" and attribute_of(func) == "data"):
        raise PartitionError(
            f"the optimizer's state '{windows[0].kind}' of parameter '{windows[0].state.name}' is on a tier "
            "(offload_optimizer): its memory cannot be exchanged. Copy values, or assign optimizer.state[p][kind]."
        )
    for window in windows:
        window.refresh()
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **keywords)
        if call == "numpy":
            result.flags.writeable = False
    if writes(call) or keywords.get("out") is not None:
        for window in windows:
            window.write_back()

    split = any(reference.guard.split for reference in found) and is_elementwise(call)

    def shown(tensor: torch.Tensor) -> Any:
        """Return a tensor of the result as user code gets it: a `TierValue` if it lies in a window's memory; a guarded
        tensor if the parameter is split over ranks and the function is elementwise; else the tensor itself."""
        if isinstance(tensor, TierValue):
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            window = next((window for window in windows if window.shares_memory(tensor)), None)
            if window is not None:
                return window.show(tensor, is_guarded=any(value.is_guarded for value in values))
            return guarded_result(tensor, (), found, is_view=False) if split else tensor

    return tree_map_only(torch.Tensor, shown, result)


class TierValue(GuardedTensor, torch.Tensor):
    """A value of a `TierState`, or a view of one; see [Note: states on a tier] in tier_states.py. Copies and pickles
    are plain tensors. ``window``: the memory that it lies in. ``is_guarded``: the optimizer's guard checks its uses."""

    window: TierWindow
    is_guarded: bool

    def fragment_reference(self) -> FragmentReference | None:
        """Return the guard's reference (the parameter's name and full shape) for this tensor; None if nothing guards
        it."""
        return self.window.state.reference if self.is_guarded else None

    __torch_function__: ClassVar[Any] = classmethod(_call_on_tier)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain copy of the tier's present values."""
        self.window.refresh()
        return plain_value(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what pickle writes: a plain tensor of the tier's present values."""
        self.window.refresh()
        return plain_value(self).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plain_value(value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` as a plain tensor in the same memory; ``value`` itself if it is not a `GuardedTensor`."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor) if isinstance(value, GuardedTensor) else value
