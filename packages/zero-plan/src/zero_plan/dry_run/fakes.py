"""Tensors without memory: torch's fake tensors, and answers to what the engine asks of their values."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._pytree import tree_iter, tree_map

from ..errors import PlanError
from .memory import LiveMemory
from .operations import Operations

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_WITHOUT_DEVICE = ("cpu", "meta")

ANSWERS: dict[tuple[str, str], bool | int] = {
    # Nobody writes into what is released.
    ("zero_partition.placeholder", "verify"): True,
    # Weights have digits that 16 bits lose: masters begin with them.
    ("zero_partition.masters", "store_masters"): False,
    # Weights are what their masters round to, since the step wrote both.
    ("zero_partition.masters", "follow_weights"): True,
    # Blocks that a codec has encoded are finite.
    ("zero_core.kernels", "quantize_blocks"): True,
    # No drawn value is outside the bounds.
    ("torch.nn.init", "_no_grad_trunc_normal_"): False,
}
"""Answers to what the engine and torch's initialisation ask of values in a run that goes well, by module and
function."""


class Outside(Protocol):
    """Decides about values that code beside the model and the engine asks for."""

    def value(self, func: Any, args: Any, place: str) -> bool | float | None:
        """Return the answer to an operation that asks for a value in a line of code, or None for an error."""

    def is_real(self, func: Any) -> bool:
        """Return whether an operation is carried out."""


class Nothing:
    """Every value that is asked for is an error."""

    def value(self, func: Any, args: Any, place: str) -> None:
        """There is none."""

    def is_real(self, func: Any) -> bool:
        """Return False."""
        return False


class PlanMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """`FakeTensorMode` whose storages are followed by ``memory`` and whose ``operations`` are counted, and that answers
    what the engine asks of values; ``outside`` is asked about other code.

    In a forked process (a worker of a data loader) tensors are real, and those that came from before are zeros.
    Raises `PlanError` naming the line in the user's file for whatever else needs values, and for another device.
    """

    def __init__(self, memory: LiveMemory, operations: Operations, outside: Outside | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._memory = memory
        self._operations = operations
        self._outside = outside or Nothing()
        self._inside = False  # an operation, which torch may work out from others
        self._process = os.getpid()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation over shapes."""
        if os.getpid() != self._process:
            return func(*_real(args), **_real(kwargs or {}))
        if func is torch.ops.aten.is_set_to.default:
            return _is_set_to(*args)
        if self._outside.is_real(func):
            return func(*args, **(kwargs or {}))
        kwargs = _without_index(kwargs or {})
        outermost, self._inside = not self._inside, True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return self._answer(func, args, error)
        except FakeTensorDeviceMismatchError as error:
            raise PlanError(
                f"{error} ({place_of(asking_outside_torch())}). Tensors that torch.load reads in a dry run have no "
                "memory and no device: build the model from its configuration alone, without weights"
            ) from error
        finally:
            self._inside = not outermost
        if outermost:
            self._operations.meet(func, args, kwargs, result)
        for tensor in tree_iter(result) if outermost else ():
            if isinstance(tensor, FakeTensor):
                _refuse_device(tensor)
                self._memory.meet(tensor)
        return result

    def _answer(self, func: Any, args: Any, error: Exception) -> Any:
        frame = asking()
        while frame is not None:
            found = ANSWERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
            if found is not None:
                return found
            if not _is_torch(frame):
                break
            frame = frame.f_back
        place = place_of(frame)
        answer = self._outside.value(func, args, place)
        if answer is not None:
            return answer
        raise PlanError(
            f"a dry run has shapes and no values, and {func} asks for one ({place}). Compute without it, or plan with "
            "the part that needs it left out."
        ) from error


def asking() -> FrameType | None:
    """Return the innermost frame outside of this package's dry run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def asking_outside_torch() -> FrameType | None:
    """Return the frame of the code that asks, through torch."""
    frame = asking()
    while frame is not None and _is_torch(frame):
        frame = frame.f_back
    return frame


def place_of(frame: FrameType | None) -> str:
    """Return file and line of a frame in words."""
    return "its place is not known" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _is_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_TORCH, _HERE, "<"))


def _is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _without_index(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with "cpu" in the place of "cpu:0", which fake tensors take for another device."""
    device = kwargs.get("device")
    named = isinstance(device, torch.device) and device.type == "cpu" and device.index is not None
    return {**kwargs, "device": torch.device("cpu")} if named else kwargs


def _refuse_device(tensor: torch.Tensor) -> None:
    if tensor.device.type not in _WITHOUT_DEVICE:
        raise PlanError(
            f"a dry run computes on the CPU, and this asks for {tensor.device}: take the device from engine.device, "
            "or leave moving the model to zero_core.initialize"
        )


def _real(values: Any) -> Any:
    """Arguments of an operation with zeros in the place of tensors without memory."""
    return tree_map(lambda v: torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, FakeTensor) else v, values)
