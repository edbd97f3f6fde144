"""Tensors without memory: torch's fake tensors, and answers to what the engine asks of their values."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_iter

from ..errors import PlanError
from .memory import LiveMemory

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep

ANSWERS: dict[tuple[str, str], bool | int] = {
    # Nobody writes into what is released.
    ("zero_partition.placeholder", "verify"): True,
    # Nor into what is gathered.
    ("zero_partition.unit_edits", "_sums"): 0,
    # Weights have digits that 16 bits lose: masters begin with them.
    ("zero_partition.masters", "hand_over"): False,
    # Blocks that a codec has encoded are finite.
    ("zero_core.kernels", "quantize_blocks"): True,
    # No drawn value is outside the bounds.
    ("torch.nn.init", "_no_grad_trunc_normal_"): False,
}
"""Answers to what the engine and torch's initialisation ask of values in a run that goes well, by module and
function."""


class PlanMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """`FakeTensorMode` whose storages are followed by ``memory``, and that answers what the engine asks of values.

    Raises `PlanError` naming the line in the user's file for whatever else needs values.
    """

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._memory = memory
        self._inside = False  # an operation, which torch may work out from others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation over shapes."""
        if func is torch.ops.aten.is_set_to.default:
            return _is_set_to(*args)
        outermost, self._inside = not self._inside, True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return _answer(func, error)
        finally:
            self._inside = not outermost
        for tensor in tree_iter(result) if outermost else ():
            if isinstance(tensor, FakeTensor):
                self._memory.meet(tensor)
        return result


def _is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _answer(func: Any, error: Exception) -> bool | int:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = ANSWERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if found is not None:
            return found
        if not frame.f_code.co_filename.startswith((_TORCH, _HERE, "<")):
            break  # the code that asked, through torch
        frame = frame.f_back
    place = "its place is not known" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}"
    raise PlanError(
        f"a dry run has shapes and no values, and {func} asks for one ({place}). Compute without it, or plan with the "
        "part that needs it left out."
    ) from error
