"""Find parameters and buffers that share memory with other tensors; refuse models in which two parameters do."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from .errors import PartitionError, name_first
from .flat_memory import is_left_memory
from .host_facts import is_fake, is_plain, sharers, storage_address

logger = logging.getLogger("zero_partition")


@dataclass(frozen=True)
class _NamedTensor:
    """A parameter or buffer and the bytes that it spans in its storage: from ``first`` to before ``end``.

    ``kind``: "parameter" or "buffer". ``storage``: the storage's address.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    storage: int
    first: int
    end: int


def refuse_shared_storage(model: nn.Module) -> None:
    """Raise `PartitionError`, naming both, if a parameter of ``model`` shares elements with another parameter or a
    buffer.

    In plain torch a write to one is a write to the other; parameters in flat buffers would diverge. Buffers may share
    memory with each other, and one parameter may have several names (tied weights).
    """
    by_storage: dict[int, list[_NamedTensor]] = {}
    for named in _named_tensors(model):
        by_storage.setdefault(named.storage, []).append(named)
    for group in by_storage.values():
        pair = _first_overlap(sorted(group, key=lambda named: named.first)) if len(group) > 1 else None
        if pair is not None:
            one, other = pair
            raise PartitionError(
                f"{one.kind} '{one.name}' and {other.kind} '{other.name}' share memory, but are two objects: an "
                "engine would train them apart. Tie them by identity (`model.b.weight = model.a.weight`), "
                "compute one from the other in forward (`F.linear(x, self.a.weight.t())`), or give one a memory of "
                "its own (`.clone()`)."
            )


def held_elsewhere(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return for each parameter whether a write to another tensor or array could change it. May be True where none can.

    True for all of ``parameters`` in one storage if any other tensor or array uses that storage, or if two of them
    share elements. False for a parameter whose memory is not examined: a tensor subclass, one that is empty, not
    strided or on the meta device, and one element expanded to a shape.
    """
    by_storage: dict[int, list[_NamedTensor]] = {}
    for number, parameter in enumerate(parameters):
        for named in _byte_range("parameter", str(number), parameter.data):
            by_storage.setdefault(named.storage, []).append(named)
    held = [False] * len(parameters)
    for group in by_storage.values():
        # each one's `parameter.data` above is one more tensor in that memory
        others = not is_fake(group[0].tensor) and sharers(group[0].tensor) > 2 * len(group)
        if others or _first_overlap(sorted(group, key=lambda named: named.first)) is not None:
            for named in group:
                held[int(named.name)] = True
    return held


def first_sharing(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of the first two of ``tensors`` (by name) that have an element of memory in common; None if
    there are none."""
    by_storage: dict[int, list[_NamedTensor]] = {}
    for name, tensor in tensors.items():
        for named in _byte_range("parameter", name, tensor):
            by_storage.setdefault(named.storage, []).append(named)
    for group in by_storage.values():
        if pair := _first_overlap(sorted(group, key=lambda named: named.first)):
            return pair[0].name, pair[1].name
    return None


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of ``tensors`` in groups: tensors whose byte ranges in one storage overlap are in one group;
    any other tensor is a group of its own."""
    groups: list[list[int]] = []
    by_storage: dict[int, list[_NamedTensor]] = {}
    for number, tensor in enumerate(tensors):
        groups += [] if (found := list(_byte_range("buffer", str(number), tensor))) else [[number]]
        for named in found:
            by_storage.setdefault(named.storage, []).append(named)
    for together in by_storage.values():
        end = -1
        for named in sorted(together, key=lambda named: named.first):
            if named.first >= end:
                groups.append([])
            groups[-1].append(int(named.name))
            end = max(end, named.end)
    return groups


def warn_of_aliases(model: nn.Module) -> None:
    """Log a warning that names the first parameter of ``model`` in whose memory there are tensors or arrays that are
    not the model's; log nothing if there is none.

    Garbage is collected first, so that what only garbage holds does not count. Users of memory that torch does not know
    of (`torch.from_numpy`) are not seen, and memory that a closed engine has left is passed over.
    """
    names = _aliased_parameters(model)
    if names and gc.collect():
        names = _aliased_parameters(model)
    if names:
        logger.warning(
            "%s: other code holds a tensor or an array in this memory (what `.data`, `.detach()`, `.numpy()` or "
            "`state_dict()` gave, or the graph of an earlier forward), so that it stays allocated. The engine's "
            "weights have memory of their own: what is written there from now on changes no weight, and what is read "
            "there does not follow the training. Take it after initialize (writes through `p.data` count), or read "
            "`engine.full_param(p)`",
            name_first(names[0], len(names)),
        )


def _aliased_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of ``model`` in whose memory there are tensors or arrays that are not the
    model's."""
    by_storage: dict[int, list[_NamedTensor]] = {}
    for named in _named_tensors(model):
        by_storage.setdefault(named.storage, []).append(named)
    found: list[str] = []
    replaced = Counter(map(storage_address, _replaced_before_use(model)))
    for storage, group in by_storage.items():
        names = [named.name for named in group if named.kind == "parameter"]
        known = len(group) + len(names) + replaced[storage]  # each `parameter.data` above is a tensor in that memory
        if not is_fake(group[0].tensor) and not is_left_memory(group[0].tensor) and sharers(group[0].tensor) > known:
            found += names
    return found


def _replaced_before_use(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that `torch.nn.utils.spectral_norm` keeps as plain attributes of modules of ``model`` until
    forward computes others; they alias parameters."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield getattr(module, hook.name)


def _named_tensors(model: nn.Module) -> Iterator[_NamedTensor]:
    """Yield the parameters and buffers of ``model`` with the bytes that they span, except those that `_byte_range`
    leaves out."""
    for name, parameter in model.named_parameters():
        yield from _byte_range("parameter", name, parameter.data)
    for name, buffer in model.named_buffers():
        yield from _byte_range("buffer", name, buffer)


def _byte_range(kind: str, name: str, tensor: torch.Tensor) -> Iterator[_NamedTensor]:
    """Yield ``tensor`` once, with the bytes that it spans; nothing if it is a tensor subclass, has no strided memory,
    is empty, or is a parameter that expands a single element to its shape.

    ``kind``: "parameter" or "buffer". ``name``: in the model.
    """
    if not is_plain(tensor) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return
    if kind == "parameter" and tensor.numel() > 1 and not any(tensor.stride()):
        return  # one element in another shape: what `Init` leaves, or a constant
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    end = first + (int(last) + 1) * size
    yield _NamedTensor(kind, name, tensor, storage_address(tensor), first, end)


def _first_overlap(group: list[_NamedTensor]) -> tuple[_NamedTensor, _NamedTensor] | None:
    """Return the first two tensors of ``group`` that share an element and are not both buffers; None if there are none.

    ``group``: tensors of one storage, sorted by their first bytes.
    """
    for index, one in enumerate(group):
        for other in group[index + 1 :]:
            if other.first >= one.end:
                break
            if "parameter" in (one.kind, other.kind) and _share_elements(one, other):
                return one, other
    return None


def _share_elements(one: _NamedTensor, other: _NamedTensor) -> bool:
    """Return whether two tensors of one storage whose byte ranges overlap have an element in common; True, without
    comparing, if their dtypes differ."""
    if one.tensor.dtype is not other.tensor.dtype:
        return True
    start = min(one.first, other.first) // one.tensor.element_size()
    marks = torch.zeros(max(one.end, other.end) // one.tensor.element_size() - start, dtype=torch.bool)
    marked, asked = (
        marks.as_strided(n.tensor.shape, n.tensor.stride(), n.tensor.storage_offset() - start) for n in (one, other)
    )
    marked.fill_(True)
    return bool(asked.any())
