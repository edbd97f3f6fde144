"""Gather a unit before backward reads a view of it that autograd saved in forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .dispatch_modes import CHECKPOINT_MODULE, any_modes, call_outside_modes
from .errors import PartitionError
from .host_facts import storage_address
from .unit import Unit


class SavedViews:
    """Saved-tensor hooks that make backward gather a unit before it reads a saved view of the unit's memory.

    Other tensors go through the hooks that were active before `open`, if any (save_on_cpu and the like), else are saved
    as they are, in an object whose attribute ``stays`` is True: hooks inside, which call these, may store such a tensor
    elsewhere. torch does not check the versions of tensors that go through hooks, so this class does.

    ``unit_of_storage``: returns the gathered unit whose memory is at an address, else None. ``before_backward``:
    gathers units that backward is about to read.
    """

    def __init__(
        self, unit_of_storage: Callable[[int], Unit | None], before_backward: Callable[[Sequence[Unit]], None]
    ) -> None:
        self._unit_of_storage = unit_of_storage
        self._before_backward = before_backward
        self._outer: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None = None
        self._context: saved_tensors_hooks | None = None

    def open(self) -> None:
        """Install the hooks in this thread until `close`, around the saved-tensor hooks that are active there now,
        which other tensors still go through. Raises `PartitionError` where torch has saved-tensor hooks disabled."""
        why = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if why is not None:
            raise PartitionError(
                "forward at stage 3 was called where saved-tensor hooks are disabled, by which sharded parameters come "
                f"back in backward (torch.autograd.graph.disable_saved_tensors_hooks: {why!r}). Call it outside, or "
                "use stage 0, 1 or 2."
            )
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._context = saved_tensors_hooks(self._make_pack(self._outer), self._unpack)
        self._context.__enter__()

    def open_in_backward(self) -> None:
        """Install the hooks, as `open` does, for a forward that backward recomputes. Do nothing if activation
        checkpointing has its own hooks installed there: it keeps the views themselves, whose memory stays."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None or getattr(outer[0], "__module__", "") != CHECKPOINT_MODULE:
            self.open()

    def close(self) -> None:
        """Remove the hooks; tensors saved so far are still unpacked by them. Does nothing if they are not installed."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None

    def _make_pack(self, outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> Callable[[torch.Tensor], Any]:
        """Return the pack hook, which saves a view of a unit as a `_SavedView` and leaves other tensors to ``outer``.

        ``outer``: the (pack, unpack) hooks that were active before, None for none. If these are activation
        checkpointing's, they are called with views of units too, as they count what is saved.
        """
        find = self._unit_of_storage
        # checkpointing around the engine counts what is saved, and sees these views when it runs forward again
        is_counted = outer is not None and getattr(outer[0], "__module__", "") == CHECKPOINT_MODULE

        def pack(tensor: torch.Tensor) -> Any:
            """Return the object that autograd keeps of ``tensor`` until `_unpack`: a `_SavedView` for a view of a unit;
            else a `_SavedOuter` if there are outer hooks, or a `_SavedTensor`."""
            unit = find(address_of(tensor))
            if outer is not None:
                if unit is None:
                    return _SavedOuter(*outer, tensor)
                if is_counted:
                    outer[0](tensor)
            # the graph of a result that its own operation saves would hold itself, and never be freed
            saved = tensor if tensor.grad_fn is None else tensor.detach()
            return _SavedTensor((saved, saved._version)) if unit is None else _SavedView(unit, saved)

        return pack if outer is None else functools.update_wrapper(pack, outer[0], assigned=(), updated=())

    def _unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that the pack hook saved as ``packed``; gather its unit first if it is a view of one.

        If the tensor was written since, raises `PartitionError` for a view of a unit, RuntimeError for any other.
        """
        if isinstance(packed, _SavedTensor):
            saved, version = packed
            if saved._version != version:
                _raise_modified(saved, version)
            return saved
        if isinstance(packed, _SavedOuter):
            return packed.restore()
        view: torch.Tensor = packed.tensor
        if view._version != packed.version:
            raise PartitionError(
                f"parameter '{packed.unit.layout.name_at(view.storage_offset())}' was changed, by a step or in place, "
                "after forward had used it, so gradients would be wrong; plain torch raises too. Run backward "
                "first, or run forward again."
            )
        if any_modes():
            call_outside_modes(self._before_backward, [packed.unit])
        else:
            self._before_backward([packed.unit])
        return view


class _SavedView:
    """A saved view of a unit's flat buffer; while it exists, it is counted in the unit's `FlatMemory`.

    Attributes:
        version: the tensor's version counter when it was saved.
        holds: it is counted; a released parameter that a custom function saved is not, as it has no memory there.
    """

    __slots__ = ("holds", "memory", "tensor", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.tensor = tensor
        self.version = tensor._version
        self.memory = unit.memory
        # a custom function saves the parameter itself, which is released
        self.holds = nn.Parameter not in type(tensor).__mro__
        self.memory.saved += self.holds

    def __del__(self) -> None:
        """Subtract the view from the unit's count, as autograd has dropped it."""
        self.memory.saved -= self.holds


class _SavedTensor(tuple[torch.Tensor, int]):
    """A tensor that was saved as it is, and its version counter then. A tuple, as most saved tensors are of this kind.

    Attributes:
        stays: True; no hooks have taken the tensor elsewhere.
    """

    __slots__ = ()
    stays = True


class _SavedOuter:
    """A tensor that outer hooks, installed around the engine, have packed, and their unpack hook. Constructing it packs
    ``tensor``.

    ``pack``, ``unpack``: the outer hooks.

    Attributes:
        stays: the outer hooks have left the tensor as it is.
    """

    __slots__ = ("_packed", "_unpack", "stays")

    def __init__(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], tensor: torch.Tensor
    ) -> None:
        self._unpack = unpack
        self._packed = pack(tensor)
        self.stays: bool = self._packed is tensor or getattr(self._packed, "stays", False)

    def restore(self) -> torch.Tensor:
        """Return the tensor, unpacked by the outer hooks."""
        return self._unpack(self._packed)


def _raise_modified(tensor: torch.Tensor, version: int) -> NoReturn:
    """Raise the RuntimeError that torch raises where ``tensor`` was written in place after autograd saved it.

    ``version``: its version counter when it was saved.
    """
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of {tensor.dtype} and shape {list(tensor.shape)} is at version {tensor._version}; expected version "
        f"{version} instead. Write out of place, or after backward."
    )


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor``; for a fake tensor a number that identifies the storage; 0 for a
    tensor without a storage of its own (a sparse one)."""
    try:
        return tensor.untyped_storage().data_ptr() or storage_address(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and functional tensors have no storage of their own
        return 0


def explain_refused_transform(failure: BaseException, name: str) -> None:
    """Replace the text of ``failure``, in place, by one that names parameter ``name`` and says what to write instead,
    if it is torch's refusal of a torch.func transform because of `SavedViews`; else do nothing."""
    if isinstance(failure, RuntimeError) and "saved tensor hooks" in str(failure):
        failure.args = (
            "torch.func.grad, vjp, jacrev and hessian cannot run inside a forward that gathers sharded parameters such "
            f"as '{name}'. Open `with engine.gathered(model.parameters())` around the forward, or use "
            "torch.autograd.grad(…, create_graph=True), torch.func.jvp or torch.func.jacfwd.",
        )


def explain_refused_tracing(failure: BaseException, name: str) -> None:
    """Replace the text of ``failure``, in place, by one that names parameter ``name`` and says what to write instead,
    if it says that torch could not trace the class of a parameter; else do nothing."""
    if isinstance(failure, TypeError) and "ProxyTorchDispatchMode" in str(failure):
        failure.args = (
            "torch.func.linearize and make_fx cannot trace a forward inside an engine, whose parameters such as "
            f"'{name}' have a class of the engine's own. Use torch.func.jvp instead.",
        )
