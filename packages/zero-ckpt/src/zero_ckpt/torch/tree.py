"""State dicts as plain data plus named tensors, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import DamagedError, NotPlainDataError
from ..plain import to_plain

_TENSOR, _MAP, _TUPLE = "$tensor", "$map", "$tuple"


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` as plain data in which each tensor is replaced by `{"$tensor": name}`; the name is the tensor's
    path in `value`, which begins with `path`.

    The tensors, detached, are added to `tensors` by name. Tuples, and dicts with keys that are no plain strings, are
    marked, so that `decode` restores them. Raises NotPlainDataError with the path of what is neither a tensor nor plain
    data, and of a dict with a tensor in a key.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
        return {_MAP: [[_encode_key(key, path), encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    return to_plain(value, path)


def _encode_key(key: Any, path: str) -> Any:
    """Return a key of the dict at `path` as plain data. Raises NotPlainDataError for what is not plain data and for a
    key with a tensor in it: loading would make another tensor, and so another key."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(key, f"{path} key", tensors)
    if tensors:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors.values())
        raise NotPlainDataError(
            f"{path} has a tensor of shape {shapes} in a key, which would be another key when it is loaded; use a "
            "string or a number as the key"
        )
    return encoded


def decode(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that `encode` has encoded as `value`; `read` is called with the name of each tensor and returns
    the tensor.

    Raises DamagedError for an unknown marker, and the exceptions of `read`.
    """
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == _TENSOR:
            return read(item)
        if key == _TUPLE:
            return tuple(decode(part, read) for part in item)
        if key == _MAP:
            return {decode(name, read): decode(part, read) for name, part in item}
        if key.startswith("$"):
            raise DamagedError(f"{key!r} is no marker of a stored state dict")
    return {key: decode(item, read) for key, item in value.items()}
