"""Conversion of client state, which may hold tensors, tuples and keys of any kind, to a checkpoint's plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero_ckpt.torch import dtype_name, torch_dtype

_MARK = "zero_core.as_deepspeed"
"""The key that marks converted values in checkpoints; never change it, or old checkpoints lose their meaning."""


def to_plain(value: Any) -> Any:
    """Return ``value`` as plain data: tensors, tuples, sets and mappings with other keys than strings become marked
    dicts, inside lists and mappings too.

    Tensors are copied to the CPU. Objects of other types stay as they are; the checkpoint refuses those that are not
    plain data, by path.
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {_MARK: "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data}
    if isinstance(value, (tuple, set, frozenset)):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {_MARK: kind, "items": [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _MARK not in value:
            return {key: to_plain(item) for key, item in value.items()}
        return {_MARK: "dict", "items": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    return value


def from_plain(value: Any) -> Any:
    """Return the value that `to_plain` converted; frozensets become sets, mappings dicts, tensors CPU tensors."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: from_plain(item) for key, item in value.items()}
    if kind == "tensor":
        return _tensor(torch_dtype(value["dtype"]), value["shape"], value["data"])
    items = [from_plain(item) for item in value["items"]]
    return {"tuple": tuple, "set": set, "dict": dict}[kind](items)


def _tensor(dtype: torch.dtype, shape: list[int], data: bytes) -> torch.Tensor:
    """Return a CPU tensor of ``dtype`` and ``shape`` with a copy of ``data``, its bytes in memory order."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
