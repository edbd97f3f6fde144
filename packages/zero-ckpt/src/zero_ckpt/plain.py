"""Plain data: `None`, bool, int, float, str, bytes, list and map with string keys, and their msgpack form.

Tuples are stored as lists. Integers of up to 1000 bytes are kept, those beyond 64 bits as an extension type; Python
does not print much longer ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]

from .errors import DamagedError, NotPlainDataError

_BIG_INT, _MOST_INT_BYTES = 1, 1000
_MAX_DEPTH = 100
_OBJECT_BYTES, _OBJECT_BYTES_PER_BYTE = 256 << 20, 8
_MAX_PAIRS = 1 << 22
_LIST_BYTES, _MAP_BYTES, _PAIR_BYTES = 72, 80, 56
_FLAT = frozenset({type(None), bool, int, float, bytes})
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, list, dict})


def to_plain(value: Any, path: str, *, max_items: int | None = None) -> Any:
    """Return a copy of `value` as plain data; tuples become lists, subclasses of plain types their plain values.

    `path` is the name under which errors report `value`. Raises NotPlainDataError with the path of the first item that
    is not plain data, for example `client_state["sampler"].fn`, for nesting of more than 100 levels, or when there are
    more than `max_items` items (None: any number). An item that is referred to twice counts and is copied twice, so a
    small file can expand to many items.
    """
    items = None if max_items is None else iter(range(max_items))
    _spend_items(items, 1, path)
    return _copy(value, path, 0, items)


def _copy(value: Any, path: str, depth: int, items: Iterator[int] | None) -> Any:
    """Return a copy of `value` as plain data. Raises NotPlainDataError for what is not plain data, nesting of more than
    100 levels, or too many items.

    `path` names the value in errors, `depth` is the number of lists and dicts around it, and `items` yields once per
    item that is still allowed; None for no limit.
    """
    kind = type(value)
    if kind is str:
        return _require_encodable(value, path)
    if kind in _FLAT:
        return value
    if depth >= _MAX_DEPTH:
        raise NotPlainDataError(f"{path} is nested more than {_MAX_DEPTH} levels deep (or refers to itself)")
    if kind in (list, tuple):
        _spend_items(items, len(value), path)
        if _FLAT.issuperset(map(type, value)):  # states of generators have a thousand numbers
            return list(value)
        return [_copy(item, f"{path}[{index}]", depth + 1, items) for index, item in enumerate(value)]
    if isinstance(value, dict):
        _spend_items(items, len(value), path)
        return {
            key if type(key) is str and key.isascii() else _checked_key(key, path): item
            if type(item) in _FLAT
            else _copy(item, f"{path}[{key!r}]", depth + 1, items)
            for key, item in value.items()
        }
    for plain in (int, float, str, bytes):
        if isinstance(value, plain):  # subclasses such as numpy.float64 or an enum of str
            return _copy(plain(value), path, depth, items)  # type: ignore[arg-type]
    raise NotPlainDataError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which is not plain data "
        "(None, bool, int, float, str, bytes, list, or dict with string keys); "
        "convert it, or save tensors as tensors"
    )


def _spend_items(items: Iterator[int] | None, count: int, path: str) -> None:
    """Use up `count` of the items that `items` still allows (None: any number). Raises NotPlainDataError, naming
    `path`, when fewer are left."""
    if items is not None and sum(1 for _ in itertools.islice(items, count)) < count:
        raise NotPlainDataError(f"{path} has more items than are read")


def _require_encodable(value: str, path: str) -> str:
    """Return the string `value`. Raises NotPlainDataError, naming `path`, if it has half a surrogate pair, which UTF-8
    cannot encode."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise NotPlainDataError(f"{path} is {value!r}, which is not valid Unicode: {error.reason}") from error
    return value


def _checked_key(key: Any, path: str) -> str:
    """Return the key of a map as a str. Raises NotPlainDataError when `key` is no string or not valid Unicode. `path`
    names the map in errors."""
    if not isinstance(key, str):
        raise NotPlainDataError(f"{path} has the key {key!r} of type {type(key).__name__}; keys must be strings")
    return _require_encodable(str(key), path)


def pack(value: Any) -> bytes:
    """Return plain data as msgpack bytes. Raises NotPlainDataError for an integer of more than 1000 bytes and for other
    types."""
    packed: bytes = msgpack.packb(value, default=_pack_big_int, use_bin_type=True)
    return packed


def _pack_big_int(value: Any) -> msgpack.ExtType:
    """Return an integer beyond 64 bits as a msgpack extension value: msgpack calls this for values that it cannot
    encode itself. Raises NotPlainDataError for any other type, and for an integer of more than 1000 bytes."""
    if isinstance(value, int):
        nbytes = value.bit_length() // 8 + 1
        if nbytes > _MOST_INT_BYTES:
            raise NotPlainDataError(
                f"an integer of {nbytes} bytes, expected at most {_MOST_INT_BYTES}; save it as bytes"
            )
        return msgpack.ExtType(_BIG_INT, value.to_bytes(nbytes, "little", signed=True))
    raise NotPlainDataError(f"{type(value).__qualname__} is not plain data")


def unpack(data: bytes | memoryview) -> Any:
    """Return the plain data that msgpack bytes hold.

    Raises DamagedError when they are not valid, a map has a key twice or more than four million keys, a value is not
    plain (a timestamp, an unknown extension), or lists and maps take more memory than 256 MiB plus eight times the
    bytes.
    """
    decoding = _Decoding(len(data))
    try:
        value = msgpack.unpackb(
            data,
            ext_hook=_unpack_ext,
            list_hook=decoding.take_list,
            object_pairs_hook=decoding.take_map,
            strict_map_key=True,
            max_map_len=_MAX_PAIRS,
            raw=False,
        )
        decoding.take_list([value])
    except (ValueError, RecursionError, MemoryError, OverflowError, msgpack.UnpackException) as error:
        raise DamagedError(f"not valid msgpack: {type(error).__name__}: {error}") from error
    return value


def first_duplicate(keys: Iterable[str]) -> str | None:
    """Return the first key that equals an earlier one; None if all differ."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


class _Decoding:
    """Hooks for msgpack's decoder that bound the memory of lists and maps and refuse values that are not plain data.

    `nbytes` is the length of the encoded data; lists and maps may take 256 MiB plus eight times that.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = _OBJECT_BYTES + _OBJECT_BYTES_PER_BYTE * nbytes

    def take_list(self, items: list[Any]) -> list[Any]:
        """Return the decoded list `items` after counting its memory. Raises ValueError if all lists and maps take more
        than the bound, and for an item that is not plain data."""
        self._spend(_LIST_BYTES + 8 * len(items))
        self._require_plain(items)
        return items

    def take_map(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return a decoded map, given as (key, value) pairs, as a dict after counting its memory. Raises ValueError if
        all lists and maps take more than the bound, for a key that is there twice, and for a value that is not plain
        data."""
        self._spend(_MAP_BYTES + _PAIR_BYTES * len(pairs))
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError(f"a map has the key {first_duplicate(key for key, _ in pairs)!r} twice")
        self._require_plain(table.values())
        return table

    def _spend(self, nbytes: int) -> None:
        """Count `nbytes` more bytes of lists and maps. Raises ValueError when that is more than the bound."""
        self._left -= nbytes
        if self._left < 0:
            raise ValueError("its lists and maps take too much memory for its size")

    @staticmethod
    def _require_plain(values: Iterable[Any]) -> None:
        """Raise ValueError unless every value has one of the types of plain data."""
        odd = set(map(type, values)) - _PLAIN_TYPES
        if odd:
            raise ValueError(f"{', '.join(sorted(kind.__name__ for kind in odd))} is not plain data")


def _unpack_ext(code: int, data: bytes) -> int:
    """Return the integer of a msgpack extension value of type `code`.

    Raises ValueError for another type than this package's, and for an integer of more than 1000 bytes.
    """
    if code != _BIG_INT:
        raise ValueError(f"unknown extension type {code}")
    if len(data) > _MOST_INT_BYTES:
        raise ValueError(f"an integer of {len(data)} bytes, expected at most {_MOST_INT_BYTES}")
    return int.from_bytes(data, "little", signed=True)
