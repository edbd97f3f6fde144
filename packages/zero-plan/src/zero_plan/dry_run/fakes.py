"""Tensors without memory: torch's fake tensors, and answers for code that reads their values."""

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
from .shortcuts import Shortcuts

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DRY_RUN = os.path.dirname(__file__) + os.sep
_ALLOWED_DEVICES = ("cpu", "meta")
_GROUPED_MM = torch.ops.aten._grouped_mm.default
_DEVICE, _COPY = torch.ops.prim.device.default, torch.ops.aten.copy_.default
_READ = torch.ops.aten._local_scalar_dense.default

ANSWERS: dict[tuple[str, str], bool | int] = {
    # Are all placeholders still NaN? Yes: released parameters were not written.
    ("zero_partition.placeholder", "verify_values"): True,
    # Do 16 bits represent the initial weights exactly? No, so masters are stored.
    ("zero_partition.masters", "store_masters"): False,
    # Do the masters round to the weights? Yes: the step wrote both.
    ("zero_partition.masters", "follow_weights"): True,
    # How many steps have loaded states taken? At least one.
    ("zero_core.checkpoint.tiers", "tier_values"): 1,
    ("zero_core.checkpoint.loading", "_drop_unstarted"): True,
    # Are the scales of encoded blocks finite? Yes.
    ("zero_core.kernels", "quantize_blocks"): True,
    # Are drawn values outside the bounds? No.
    ("torch.nn.init", "_no_grad_trunc_normal_"): False,
}
"""The values that the engine and torch's initialisation read in a run without errors, by module and function."""


class ValueSource(Protocol):
    """Answers reads of tensor values that `ANSWERS` does not list, such as those of a user's script."""

    def value_for(self, func: Any, args: Any, place: str) -> bool | float | None:
        """Return the value that the operation ``func`` reads from ``args``; None makes the read an error.

        ``place``: file and line of the code that reads, as text. Called for each read that `ANSWERS` does not answer.
        """

    def runs_for_real(self, func: Any) -> bool:
        """Return whether ``func``, an operation of torch that is about to run, is run on real memory and gives a real
        tensor. Called before every operation.
        """


class NoValues:
    """A `ValueSource` without values: every read is an error."""

    def value_for(self, func: Any, args: Any, place: str) -> None:
        """Return None, which makes the read an error."""

    def runs_for_real(self, func: Any) -> bool:
        """Return False, as every operation runs on shapes alone."""
        return False


class PlanMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` that tracks storages in ``memory``, counts FLOPs in ``operations`` and answers reads of
    values: from `ANSWERS`, else from ``values`` (by default `NoValues`). Operations also take real tensors, by their
    shapes alone.

    In a forked process (a worker of a data loader) tensors are real, and fake tensors made before the fork are zeros.
    Raises `PlanError` for any other read of values, naming the line in the user's file, and for a tensor that is on
    neither the CPU nor the meta device.
    """

    def __init__(self, memory: LiveMemory, operations: Operations, values: ValueSource | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._memory = memory
        self._operations = operations
        self._values = values or NoValues()
        self._shortcuts = Shortcuts(self)
        self._in_operation = False  # true for the operations that torch runs to work out another one; they do not count
        self._process = os.getpid()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, to torch's question whether to wrap dispatch against compilation: nothing is compiled here, and
        the wrapper would cost as much as an operation.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on shapes alone and return its results; track their storages and count the operation's
        FLOPs.

        Operations that torch runs to work out another one are neither tracked nor counted. Raises `PlanError` for a
        read of values without an answer, and for a tensor on another device.
        """
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if os.getpid() != self._process:
            return func(*_with_zeros(args), **_with_zeros(kwargs or {}))
        if func is _COPY and _copies_in_place(*args):
            return args[0]
        if func is torch.ops.aten.is_set_to.default:
            return _is_set_to(*args)
        if self._values.runs_for_real(func):
            return func(*args, **(kwargs or {}))
        kwargs = _without_device_index(kwargs or {})
        outermost, self._in_operation = not self._in_operation, True
        try:
            result = self._run_on_shapes(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return self._value_for_read(func, args, error)
        except FakeTensorDeviceMismatchError as error:
            raise PlanError(
                f"{error} ({file_and_line(frame_outside_torch())}). Tensors that torch.load reads in a dry run have no "
                "memory and no device: build the model from its configuration alone, without weights"
            ) from error
        finally:
            self._in_operation = not outermost
        if outermost:
            self._operations.count(func, args, kwargs, result)
            for tensor in (result,) if isinstance(result, FakeTensor) else tree_iter(result):
                if isinstance(tensor, FakeTensor):
                    _refuse_other_device(tensor)
                    self._memory.track(tensor)
        return result

    def _run_on_shapes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an operation, by a shortcut that knows it or by torch's fake mode. Raises
        `DataDependentOutputException` for one that reads the value of a tensor without values.
        """
        if func is _READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            raise DataDependentOutputException(func)
        result: Any = self._shortcuts.run_view(func, args, kwargs)
        if result is not None:
            return result
        if func is _GROUPED_MM and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        key = self._shortcuts.key(func, args, kwargs)
        result = None if key is None else self._shortcuts.run_known(key)
        if result is None:
            result = self.dispatch(func, types, args, kwargs)
            if key is not None:
                self._shortcuts.learn(key, args, result)
        return result

    def _value_for_read(self, func: Any, args: Any, error: Exception) -> Any:
        """Return the value that ``func`` is to read from ``args``, which have none: from `ANSWERS` if the innermost
        functions on the stack, up to the first outside torch, include a listed one; else from ``values``. Raises
        `PlanError` from ``error``, that of the read, if there is no value.
        """
        frame = frame_outside_dry_run()
        while frame is not None:
            found = ANSWERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
            if found is not None:
                return found
            if not _is_in_torch(frame):
                break
            frame = frame.f_back
        place = file_and_line(frame)
        answer = self._values.value_for(func, args, place)
        if answer is not None:
            return answer
        raise PlanError(
            f"a dry run has shapes and no values, and {func} asks for one ({place}). Compute without it, or plan with "
            "the part that needs it left out."
        ) from error


def frame_outside_dry_run() -> FrameType | None:
    """Return the innermost frame of the stack that does not belong to `zero_plan.dry_run`; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_DRY_RUN):
        frame = frame.f_back
    return frame


def frame_outside_torch() -> FrameType | None:
    """Return the innermost frame whose code has a file and belongs neither to torch nor to `zero_plan.dry_run`; None if
    there is none, as for a script given with ``python -c``."""
    frame = frame_outside_dry_run()
    while frame is not None and _is_in_torch(frame):
        frame = frame.f_back
    return frame


def file_and_line(frame: FrameType | None) -> str:
    """Return the file and line of ``frame`` as text; for None a text that says that the place is not known."""
    return "its place is not known" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _is_in_torch(frame: FrameType) -> bool:
    """Return whether ``frame`` runs code of torch, of the dry run, or code without a file."""
    return frame.f_code.co_filename.startswith((_TORCH, _DRY_RUN, "<"))


def _is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two fake tensors share their storage and have the same offset, shape and strides, as
    `torch.Tensor.is_set_to` does, which has no implementation for fake tensors.
    """
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _copies_in_place(out: torch.Tensor, given: torch.Tensor, *_: object) -> bool:
    """Return whether ``out.copy_(given)`` can be left out in a dry run, as it is valid and changes no shape and no
    memory: both are fake tensors of one shape and device, and ``out`` is contiguous. Further arguments of the operation
    are ignored.
    """
    if not isinstance(out, FakeTensor) or not isinstance(given, FakeTensor):
        return False
    return out.shape == given.shape and bool(out.fake_device == given.fake_device) and out.is_contiguous()


def _grouped_product(
    one: torch.Tensor,
    other: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty tensor of the shape and dtype of the result of ``torch._grouped_mm`` with these arguments.
    torch's own rule for shapes knows bfloat16 only, though the operation takes other dtypes.
    """
    shape = [one.size(-2), other.size(-1)]
    if one.dim() == other.dim():
        shape.insert(0, one.size(0) if offs is None else offs.numel())
    return one.new_empty(shape, dtype=out_dtype or one.dtype)


def _without_device_index(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an operation with the device "cpu" in place of "cpu:0", which fake tensors take
    for another device.
    """
    device = kwargs.get("device")
    named = isinstance(device, torch.device) and device.type == "cpu" and device.index is not None
    return {**kwargs, "device": torch.device("cpu")} if named else kwargs


def _refuse_other_device(tensor: torch.Tensor) -> None:
    """Raise `PlanError` if ``tensor`` is neither on the CPU nor on the meta device."""
    if tensor.device.type not in _ALLOWED_DEVICES:
        raise PlanError(
            f"a dry run computes on the CPU, and this asks for {tensor.device}: take the device from engine.device, "
            "or leave moving the model to zero_core.initialize"
        )


def _with_zeros(values: Any) -> Any:
    """Return ``values``, arguments of an operation, with real zeros in place of fake tensors."""
    return tree_map(lambda v: torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, FakeTensor) else v, values)
