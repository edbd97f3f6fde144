"""Find parameters that share memory with other tensors, and refuse models in which two of them do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .errors import PartitionError
from .host_facts import is_fake, is_plain, sharers, storage_address


@dataclass(frozen=True)
class _Named:
    kind: str
    name: str
    tensor: torch.Tensor
    storage: int
    first: int
    end: int


def refuse_shared_storage(model: nn.Module) -> None:
    """Raise `PartitionError`, naming both, when a parameter shares elements with another parameter or a buffer.

    In plain torch a write to one is a write to the other; once parameters live in flat buffers they would drift apart.
    Buffers among themselves stay as they are. One parameter under several names is tied by identity, which stays.
    """
    by_storage: dict[int, list[_Named]] = {}
    for named in _tensors(model):
        by_storage.setdefault(named.storage, []).append(named)
    for group in by_storage.values():
        pair = _overlapping(sorted(group, key=lambda named: named.first)) if len(group) > 1 else None
        if pair is not None:
            one, other = pair
            raise PartitionError(
                f"{one.kind} '{one.name}' and {other.kind} '{other.name}' share memory, but are two objects: an "
                "engine would train them apart. Tie them by identity (`model.b.weight = model.a.weight`), "
                "compute one from the other in forward (`F.linear(x, self.a.weight.t())`), or give one a memory of "
                "its own (`.clone()`)."
            )


def held_elsewhere(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return for each parameter whether a tensor or array that is none of ``parameters`` is in its memory, or one of
    them shares an element with it: what is written there is written to the parameter."""
    by_storage: dict[int, list[_Named]] = {}
    for number, parameter in enumerate(parameters):
        for named in _place("parameter", str(number), parameter.data):
            by_storage.setdefault(named.storage, []).append(named)
    held = [False] * len(parameters)
    for group in by_storage.values():
        # each one's `parameter.data` above is one more tensor in that memory
        others = not is_fake(group[0].tensor) and sharers(group[0].tensor) > 2 * len(group)
        if others or _overlapping(sorted(group, key=lambda named: named.first)) is not None:
            for named in group:
                held[int(named.name)] = True
    return held


def _tensors(model: nn.Module) -> Iterator[_Named]:
    for name, parameter in model.named_parameters():
        yield from _place("parameter", name, parameter.data)
    for name, buffer in model.named_buffers():
        yield from _place("buffer", name, buffer)


def _place(kind: str, name: str, tensor: torch.Tensor) -> Iterator[_Named]:
    if not is_plain(tensor) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return
    if tensor.numel() > 1 and not any(tensor.stride()):
        return  # one element in another shape: what `Init` leaves, or a constant
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    end = first + (int(last) + 1) * size
    yield _Named(kind, name, tensor, storage_address(tensor), first, end)


def _overlapping(group: list[_Named]) -> tuple[_Named, _Named] | None:
    """The first two, sorted by their beginnings, that share an element and are not both buffers."""
    for index, one in enumerate(group):
        for other in group[index + 1 :]:
            if other.first >= one.end:
                break
            if "parameter" in (one.kind, other.kind) and _share_elements(one, other):
                return one, other
    return None


def _share_elements(one: _Named, other: _Named) -> bool:
    """Return whether two tensors whose bytes interleave have an element in common; of two dtypes they count as one."""
    if one.tensor.dtype is not other.tensor.dtype:
        return True
    start = min(one.first, other.first) // one.tensor.element_size()
    marks = torch.zeros(max(one.end, other.end) // one.tensor.element_size() - start, dtype=torch.bool)
    marked, asked = (
        marks.as_strided(n.tensor.shape, n.tensor.stride(), n.tensor.storage_offset() - start) for n in (one, other)
    )
    marked.fill_(True)
    return bool(asked.any())
