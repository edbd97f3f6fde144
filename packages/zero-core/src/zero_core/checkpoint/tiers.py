"""The intervals (contiguous elements of named full tensors) of weights and states on a tier, and the values that a
checkpoint has for a tier. ``sealed``: files of the tier that a checkpoint links to; None if it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from zero_ckpt import Checkpoint, FileExtent, Interval
from zero_ckpt.torch import dtype_name, tensor_buffer, torch_dtype
from zero_offload import HostStore, Sealed
from zero_partition import Fragment, Residency, StateTier, Unit

from .quantized import StoredSlice, quantized_moments, read_dequantized, stored_slice
from .reading import BatchedRead


def weight_intervals(store: Residency, unit: Unit, rank: int, sealed: Sealed | None) -> Iterator[Interval]:
    """Yield the intervals of ``rank``'s shard of a unit in ``store``: linked to sealed files if possible; else views of
    host memory, valid until the next update; else, for a store on files, read when the interval is written."""

    def read(fragment: Fragment) -> Any:
        """Return a copy of the fragment's bytes, read from the store now."""
        shard = store.acquire(unit.name)
        copied = shard[fragment.shard_offset : fragment.shard_offset + fragment.length].to("cpu", copy=True)
        store.release(unit.name, dirty=False)
        return tensor_buffer(copied)

    kept = store.borrow(unit.name) if isinstance(store, HostStore) else None
    if kept is not None:
        store.give_back(unit.name, dirty=False)
    for fragment in unit.layout.fragments(rank):
        if sealed is not None and unit.name not in sealed.resident:
            yield from _linked_weights(sealed, unit, fragment)
        elif kept is not None:
            part = kept[fragment.shard_offset : fragment.shard_offset + fragment.length]
            interval = _weights(unit, fragment.param_offset, tensor_buffer(part), fragment, fragment.length)
            yield replace(interval, version=partial(getattr, kept, "_version"))
        else:
            yield _weights(unit, fragment.param_offset, partial(read, fragment), fragment, fragment.length)


def _linked_weights(sealed: Sealed, unit: Unit, fragment: Fragment) -> Iterator[Interval]:
    """Yield the intervals of a fragment, one per extent of its shard's sealed files. They have no checksums: a tier's
    are of full extents."""
    itemsize = unit.plan.dtype.itemsize
    begin, end = fragment.shard_offset * itemsize, (fragment.shard_offset + fragment.length) * itemsize
    for extent in sealed.extents[unit.name]:
        first, last = max(begin, extent.offset_bytes), min(end, extent.offset_bytes + extent.nbytes)
        if first < last:
            place = extent.file_offset_bytes + first - extent.offset_bytes
            data = FileExtent(extent.path, place, last - first, owner=sealed)
            offset = fragment.param_offset + (first - begin) // itemsize
            yield _weights(unit, offset, data, fragment, (last - first) // itemsize)


def _weights(unit: Unit, offset: int, data: Any, fragment: Fragment, length: int) -> Interval:
    """Return the interval of ``length`` elements of a fragment's parameter, from element ``offset`` of that on.
    ``data``: their bytes, a file extent, or a function that returns the bytes."""
    entry = fragment.entry
    return Interval(entry.name, "param", entry.shape, dtype_name(unit.plan.dtype), offset, data, length)


def tier_intervals(
    tier: StateTier, unit: Unit, rank: int, sealed: Sealed | None, *, every_replica: bool = False
) -> Iterator[Interval]:
    """Yield the intervals of ``rank``'s states of a unit on ``tier``, and of step counts: linked to sealed files if
    possible, else read when the interval is written, one parameter in memory at a time. ``every_replica``: also step
    counts of parameters that begin on another rank."""
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def read(name: str, kind: str) -> Any:
        """Return the bytes of one kind of a parameter's state, read from the tier unless it was the parameter read
        last."""
        if name not in kept:
            kept.clear()
            kept.update(tier.states([name]))
        return tensor_buffer(kept[name][kind])

    for fragment in unit.layout.fragments(rank):
        entry = fragment.entry
        step, dtypes = tier.held(entry.name)
        for kind, dtype in dtypes.items():
            place = stored_slice(kind, dtype, entry.shape, fragment.param_offset, fragment.length)
            if sealed is not None and entry.name not in sealed.resident:
                yield from _linked(sealed, f"{entry.name}/{kind}", entry.name, place, dtype)
            else:
                yield Interval(
                    entry.name,
                    place.kind,
                    place.shape,
                    dtype_name(dtype),
                    place.offset,
                    partial(read, entry.name, kind),
                    place.length,
                    partial(tier.held, entry.name),
                )
        if (step or dtypes) and (fragment.param_offset == 0 or every_replica):
            others = tier.numbers(entry.name) if step else {}
            for kind, number in {"step": torch.tensor(float(step)), **others}.items():
                yield Interval(entry.name, f"{kind}.scalar", (), dtype_name(number.dtype), 0, tensor_buffer(number))


def _linked(sealed: Sealed, key: str, name: str, place: StoredSlice, dtype: torch.dtype) -> Iterator[Interval]:
    """Yield the intervals of ``place``, part of a state of the parameter ``name``, one per extent of the sealed files
    of ``key``."""
    for extent in sealed.extents[key]:
        data = FileExtent(
            extent.path, extent.file_offset_bytes, extent.nbytes, checksum=extent.checksum or None, owner=sealed
        )
        first, length = extent.offset_bytes // dtype.itemsize, extent.nbytes // dtype.itemsize
        yield Interval(name, place.kind, place.shape, dtype_name(dtype), place.offset + first, data, length)


def tier_values(
    unit: Unit, tier: StateTier, checkpoint: Checkpoint, rank: int, *, optimizer: bool
) -> dict[str, dict[str, Any]]:
    """Return a checkpoint's values for a tier: for each parameter in ``rank``'s shard that the checkpoint has, its
    states by kind, with "step" as an int. ``optimizer``: with moments and steps, else only masters."""
    found: dict[str, dict[str, Any]] = {}
    reading = BatchedRead(checkpoint)
    numbers: dict[tuple[str, str], torch.Tensor] = {}
    for fragment in unit.layout.fragments(rank):
        name, offset = fragment.entry.name, fragment.param_offset
        if (name, "param") not in checkpoint.tensors:
            continue
        state: dict[str, Any] = {}
        for kind in tier.kinds(name):
            if kind == "master":
                state[kind] = torch.empty(fragment.length, dtype=torch.promote_types(unit.plan.dtype, torch.float32))
                reading.add_weights(name, offset, state[kind])
            elif optimizer:
                _add_moment(reading, fragment, kind, tier.kinds(name), state)
        for kind in ("step", *tier.numbers(name)) if optimizer else ():
            if (entry := checkpoint.tensors.get((name, f"{kind}.scalar"))) is not None:
                numbers[name, kind] = torch.empty(1, dtype=torch_dtype(entry.dtype))
                reading.add(name, f"{kind}.scalar", 0, numbers[name, kind])
        found[name] = state
    reading.run()
    for (name, kind), number in numbers.items():
        found[name][kind] = int(number) if kind == "step" else number
    return found


def _add_moment(
    reading: BatchedRead, fragment: Fragment, kind: str, kinds: tuple[str, ...], state: dict[str, Any]
) -> None:
    """Add a fragment's moment ``kind`` to ``state`` if the checkpoint has it: filled when ``reading`` runs, in the
    stored dtype, or at once, in float32, if it is stored quantized and the tier's ``kinds`` have no scales."""
    name, shape, offset, length = fragment.entry.name, fragment.entry.shape, fragment.param_offset, fragment.length
    quantized = kind in quantized_moments(reading.checkpoint, name)
    if quantized and f"{kind}_scale" not in kinds:
        state[kind] = read_dequantized(reading.checkpoint, name, kind, offset, length)
        return
    place = stored_slice(kind, torch.uint8 if quantized else torch.float32, shape, offset, length)
    entry = reading.checkpoint.tensors.get((name, place.kind))
    if entry is not None:
        state[kind] = torch.empty(place.length, dtype=torch_dtype(entry.dtype))
        reading.add(name, place.kind, place.offset, state[kind])
