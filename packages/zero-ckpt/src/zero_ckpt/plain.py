"""Plain data: `None`, bool, int, float, str, bytes, list and map with string keys, and their msgpack form.

Tuples are stored as lists. Integers of any size are kept (those beyond 64 bits as an extension type).
"""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]

from .errors import DamagedError, NotPlainDataError

_BIG_INT = 1
_MAX_DEPTH = 100


def to_plain(value: Any, path: str) -> Any:
    """A copy of `value` as plain data.

    `path` is the name under which errors report `value`. Raises NotPlainDataError with the path of the first item that
    is not plain data, for example `client_state["sampler"].fn`.
    """
    return _copy(value, path, 0)


def _copy(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if depth >= _MAX_DEPTH:
        raise NotPlainDataError(f"{path} is nested more than {_MAX_DEPTH} levels deep (or refers to itself)")
    if kind in (list, tuple):
        return [_copy(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, path): _copy(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    for plain in (int, float, str, bytes):
        if isinstance(value, plain):  # subclasses such as numpy.float64 or an enum of str
            return plain(value)  # type: ignore[arg-type]
    raise NotPlainDataError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which is not plain data "
        "(None, bool, int, float, str, bytes, list, or dict with string keys); "
        "convert it, or save tensors as tensors"
    )


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise NotPlainDataError(f"{path} has the key {key!r} of type {type(key).__name__}; keys must be strings")
    return str(key)


def pack(value: Any) -> bytes:
    """Plain data as msgpack bytes."""
    packed: bytes = msgpack.packb(value, default=_pack_big_int, use_bin_type=True)
    return packed


def _pack_big_int(value: Any) -> msgpack.ExtType:
    if isinstance(value, int):
        return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    raise NotPlainDataError(f"{type(value).__qualname__} is not plain data")


def unpack(data: bytes | memoryview) -> Any:
    """Plain data from msgpack bytes; raises DamagedError when they are not valid."""
    try:
        return msgpack.unpackb(data, ext_hook=_unpack_ext, strict_map_key=True, raw=False)
    except (ValueError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise DamagedError(f"not valid msgpack: {type(error).__name__}: {error}") from error


def _unpack_ext(code: int, data: bytes) -> int:
    if code != _BIG_INT:
        raise ValueError(f"unknown extension type {code}")
    return int.from_bytes(data, "little", signed=True)
