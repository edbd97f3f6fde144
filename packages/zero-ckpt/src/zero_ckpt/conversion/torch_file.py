"""Files of `torch.save` without loading them: the structure, with the position in the file of each tensor's bytes.

Unpickling is torch's own with `weights_only=True` on the `meta` device, which allocates nothing; the few classes that
DeepSpeed's files mention are replaced by inert stand-ins. No other classes are on the allowlist.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..compat import recording_offsets
from ..errors import CheckpointError, DamagedError
from ..torch.buffers import dtype_name
from ..types import ITEMSIZE
from .archive import require_stored_archive
from .segments import Segment, SegmentedTensor

_STAND_INS = (
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class StandIn:
    """An object in place of one whose class is not imported. `arguments` are those of its constructor, `attributes` are
    its attributes by name."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {"state": state}


def load_structure(path: Path) -> Any:
    """Return the object that `torch.save` put into a file, with tensors that have no memory.

    Raises DamagedError when it cannot be read, CheckpointError when it holds objects beyond the allowlist, is
    compressed, or is not in torch's zip format.
    """
    require_stored_archive(path)
    stand_ins: list[Any] = [(type("StandIn", (StandIn,), {}), name) for name in _STAND_INS]
    try:
        with torch.serialization.safe_globals(stand_ins), recording_offsets():
            return torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects that are not read: {_names_not_allowed(path) or error}. Only if you trust the file: "
            "torch.serialization.add_safe_globals([…]) with their classes permits them"
        ) from error
    except Exception as error:  # a pickle made to hurt can raise anything from inside torch's unpickler
        raise DamagedError(f"{path}: {type(error).__name__}: {error}") from error


def _names_not_allowed(path: Path) -> str:
    """Return the names of the objects in a file that are not on the allowlist, for a message."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception as error:  # as above; the caller has an error to raise already
        return f"its pickle cannot be walked ({type(error).__name__}: {error})"
    return ", ".join(name for name in found if name not in _STAND_INS)


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor whose data begin at byte `begin` of a file."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: str
    numel: int

    def segment(self, offset: int, skip: int, length: int) -> Segment:
        """Return the stored tensor's elements `skip` to `skip + length` as a segment of another tensor, of which they
        are elements `offset` to `offset + length`."""
        return Segment(offset, length, self.file, self.begin + skip * ITEMSIZE[self.dtype])

    def whole(self, shape: tuple[int, ...] | None = None) -> SegmentedTensor:
        """Return the stored tensor, with `shape` in place of its own if one is given. Whether the shape has as many
        elements is not checked."""
        segments = (self.segment(0, 0, self.numel),) if self.numel else ()
        return SegmentedTensor(self.shape if shape is None else shape, self.dtype, segments)


def stored(tensor: torch.Tensor, file: Path) -> Stored:
    """Return the position in `file` of the bytes of a tensor of `load_structure(file)`.

    Raises CheckpointError for a tensor with strides or a dtype that is not stored, or when torch does not say where it
    lies.
    """
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None and tensor.numel():
        raise CheckpointError(f"{file}: this version of torch {torch.__version__} does not say where tensors lie")
    if not tensor.is_contiguous():
        raise CheckpointError(f"{file}: a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}")
    begin = (start or 0) + int(tensor.storage_offset()) * tensor.element_size()
    return Stored(file, begin, tuple(tensor.shape), dtype_name(tensor.dtype), tensor.numel())


def scalar(value: Any, file: Path) -> SegmentedTensor:
    """Return a number, or a one-element tensor of `load_structure(file)`, as a 0-dimensional tensor of a source.

    A number becomes F32 or, if it is an integer, I64.
    """
    if isinstance(value, torch.Tensor):
        return stored(value, file).whole(())
    data = torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.int64)
    return SegmentedTensor((), dtype_name(data.dtype), (Segment(0, 1, data=bytes(data.numpy().tobytes())),))
