"""Compare two checkpoints, name by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .conversion.dtypes import FLOATS, convert_dtype
from .inspecting import natural_key
from .manifest import TensorEntry
from .plain import pack
from .reader import Checkpoint
from .types import ITEMSIZE

_CHUNK_BYTES = 16 << 20


@dataclass
class DiffReport:
    """Differences of two checkpoints; tensors are named `name (kind)`.

    `only_first` and `only_second` are in one only, `reshaped` have another shape or dtype (both are given), `changed`
    other bytes, with how many elements differ and how far. `equal` counts equal tensors; `plain` names those of step,
    aliases, client state and configuration that differ.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    equal: int = 0
    plain: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether there is no difference."""
        return not (self.only_first or self.only_second or self.reshaped or self.changed or self.plain)


def diff(first: Checkpoint, second: Checkpoint, *, progress: Callable[[int], None] | None = None) -> DiffReport:
    """Compare two checkpoints and return the differences: in names, shapes, dtypes, bytes, step, client state,
    configuration and aliases.

    Tensors that are stored in the same slices are compared by their checksums, others by reading them, which raises
    DamagedError for damaged bytes. `progress` is called with the bytes of each tensor of `first` once that is compared.
    """
    report = DiffReport()
    for key, one in sorted(first.tensors.items(), key=lambda item: natural_key(item[0][0])):
        name = f"{key[0]} ({key[1]})"
        other = second.tensors.get(key)
        if other is None:
            report.only_first.append(name)
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            report.reshaped.append(f"{name}: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}")
        elif _same_bytes(first, second, one, other):
            report.equal += 1
        else:
            report.changed.append(f"{name}: {_describe_difference(first, second, one)}")
        if progress is not None:
            progress(one.nbytes)
    report.only_second = [f"{name} ({kind})" for name, kind in second.tensors if (name, kind) not in first.tensors]
    report.plain = [
        what
        for what in ("step", "aliases", "client_state", "config")
        if _canonical(getattr(first, what)) != _canonical(getattr(second, what))
    ]
    return report


def _canonical(value: Any) -> Any:
    """Return plain data in a form for comparing with `==`: two forms are equal if and only if all values have the same
    types and bits. So NaN equals NaN and True differs from 1. The order of keys does not count."""
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return pack(value)


def _same_bytes(first: Checkpoint, second: Checkpoint, one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two tensors of the same shape and dtype hold the same bytes; `one` is of `first`, `other` of
    `second`.

    Raises DamagedError when they have to be read and are damaged.
    """
    if [(piece.offset, piece.length) for piece in one.slices] == [(item.offset, item.length) for item in other.slices]:
        return [piece.checksum for piece in one.slices] == [piece.checksum for piece in other.slices]
    step = _CHUNK_BYTES // ITEMSIZE[one.dtype]
    for begin in range(0, one.numel, step):
        length = min(step, one.numel - begin)
        if first.read(one.name, one.kind, begin, length) != second.read(one.name, one.kind, begin, length):
            return False
    return True


def _describe_difference(first: Checkpoint, second: Checkpoint, one: TensorEntry) -> str:
    """Return text that says how many elements of a tensor differ between two checkpoints and, for floating-point
    numbers, by how much at most and how large the values are.

    Both are read in full; `one` is the entry of `first`. Raises DamagedError for what is damaged.
    """
    import numpy

    differ, apart, largest, step = 0, 0.0, 0.0, _CHUNK_BYTES // ITEMSIZE[one.dtype]
    for begin in range(0, one.numel, step):
        length = min(step, one.numel - begin)
        raw = [checkpoint.read(one.name, one.kind, begin, length) for checkpoint in (first, second)]
        bits: list[Any] = [numpy.frombuffer(data, f"V{ITEMSIZE[one.dtype]}") for data in raw]
        differ += int(numpy.count_nonzero(bits[0] != bits[1]))
        if one.dtype in FLOATS:
            values: list[Any] = [numpy.frombuffer(convert_dtype(data, one.dtype, "F64"), "<f8") for data in raw]
            with numpy.errstate(invalid="ignore"):
                gap, size = abs(values[0] - values[1]), numpy.maximum(*map(abs, values))
            apart = max(apart, float(numpy.fmax.reduce(gap, initial=0)))
            largest = max(largest, float(numpy.fmax.reduce(size, initial=0)))
    count = f"{differ} of {one.numel} elements"
    return f"{count}, {apart:.3g} apart at most, where values are up to {largest:.3g}" if one.dtype in FLOATS else count
