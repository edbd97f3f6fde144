"""Buffers and replicated parameters of a model: the same on every rank, on the compute device."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero_comm import EngineGroups, Tag
from zero_precision import PrecisionPolicy

from .errors import PartitionError
from .host_facts import is_plain
from .moving import set_data
from .shared_storage import overlapping


@dataclass(frozen=True)
class _RegisteredBuffer:
    """A buffer of the model, and where it is registered: the modules and their keys, by the buffer's full name."""

    tensor: torch.Tensor
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the first of the buffer's full names."""
        return next(iter(self.places))


def share_buffers(
    model: nn.Module,
    groups: EngineGroups,
    device: torch.device,
    *,
    policy: PrecisionPolicy,
    kept_fp32: Container[str],
    replicated: Container[str],
) -> None:
    """Move the buffers and the ``replicated`` parameters (names) of ``model`` to ``device``, with rank 0's values,
    which are broadcast over ``groups``. Collective.

    Buffers keep their dtype, unless ``policy`` has one for them. Those in ``kept_fp32`` (names) keep theirs always, but
    running statistics among them become float32, as their layers' parameters do. One buffer under several names stays
    one, and buffers that share memory share it afterwards; if one of them is kept, all are. A buffer that has to change
    is replaced in its modules. Raises `PartitionError`, naming two, for buffers of different dtypes that share memory
    and cannot stay where they are, and as `copy_values` for an expanded buffer that rank 0's values do not fit.
    """
    buffers = _buffers(model)
    moved: dict[int, torch.Tensor] = {}
    tied: set[int] = set()
    for numbers in overlapping([buffer.tensor for buffer in buffers]):
        together = [buffers[number] for number in numbers]
        kept = any(name in kept_fp32 for buffer in together for name in buffer.places)
        dtypes = _kept_dtypes(together) if kept else [_buffer_dtype(buffer.tensor, policy) for buffer in together]
        moved.update(zip(numbers, _move_together(together, device, dtypes), strict=True))
        tied.update(numbers if len(numbers) > 1 else ())
    for number, buffer in enumerate(buffers):
        present = moved[number]
        sent = present.contiguous().resolve_conj().resolve_neg()
        groups.broadcast(sent, 0, Tag("broadcast", buffer.name))
        if sent is not present and not all(present.stride()) and number not in tied:
            present = sent
        elif sent is not present:
            copy_values(present, sent, buffer.name)
        if present is not buffer.tensor:
            for module, key in buffer.places.values():
                module._buffers[key] = present
    for name, parameter in model.named_parameters():
        if name in replicated and is_plain(parameter.data) and parameter.numel():
            set_data(parameter, parameter.data.to(device).contiguous(), name)
            groups.broadcast(parameter.data, 0, Tag("broadcast", name))


@torch.no_grad()
def copy_values(buffer: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Copy ``values`` (of the same shape) into the memory of ``buffer``, which may be expanded from fewer elements.

    ``name``: of the buffer, for the error. Raises `PartitionError` if an element that several positions of the buffer
    show would need two values.
    """
    own, needed = buffer, values
    for dim in (dim for dim, stride in enumerate(buffer.stride()) if not stride and buffer.shape[dim] > 1):
        own, needed = own.narrow(dim, 0, 1), needed.narrow(dim, 0, 1)
    if own is not buffer and not torch.allclose(values, needed.expand_as(values), rtol=0, atol=0, equal_nan=True):
        raise PartitionError(
            f"buffer '{name}' is expanded from {own.numel()} elements and cannot take {values.numel()} different "
            "values. Register it with a memory of its own (`.clone()`)."
        )
    own.copy_(needed)


def _buffers(model: nn.Module) -> list[_RegisteredBuffer]:
    """Return the buffers of ``model`` in the order of its modules, each once, with all places where it is
    registered."""
    found: dict[int, _RegisteredBuffer] = {}
    for name, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None:
                places = found.setdefault(id(tensor), _RegisteredBuffer(tensor)).places
                places[f"{name}.{key}" if name else key] = (module, key)
    return list(found.values())


def _move_together(
    buffers: Sequence[_RegisteredBuffer], device: torch.device, dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Return the tensors of ``buffers`` on ``device`` in ``dtypes`` (one each), in their order.

    If there are several buffers, they share memory, and the returned tensors do too. Raises `PartitionError` where one
    copy of that memory is not right for all.
    """
    tensors = [buffer.tensor for buffer in buffers]
    if len(buffers) == 1:
        return [tensors[0].to(device, dtypes[0])]
    if all(t.device == device and t.dtype is dtype for t, dtype in zip(tensors, dtypes, strict=True)):
        return tensors
    for other in buffers[1:]:
        _refuse_other_kind(buffers[0], other, dtypes[0])
    first = min(int(t.storage_offset()) for t in tensors)
    ends = (t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in tensors)
    memory = tensors[0].as_strided((max(map(int, ends)) + 1 - first,), (1,), first).to(device, dtypes[0])
    return [memory.as_strided(t.shape, t.stride(), t.storage_offset() - first) for t in tensors]


def _refuse_other_kind(one: _RegisteredBuffer, other: _RegisteredBuffer, dtype: torch.dtype) -> None:
    """Raise `PartitionError`, which names both, unless the buffers ``one`` and ``other``, which share memory, have the
    same dtype, lazy negation and conjugation, so that one cast to ``dtype``, or one move, is right for both."""
    ours, theirs = one.tensor, other.tensor
    if ours.dtype is not theirs.dtype or ours.is_conj() != theirs.is_conj() or ours.is_neg() != theirs.is_neg():
        raise PartitionError(
            f"buffers '{one.name}' ({ours.dtype}) and '{other.name}' ({theirs.dtype}) share memory, and a copy of it "
            f"as {dtype} would not have the bits that both show. Give one a memory of its own (`.clone()`), compute "
            "one from the other in forward, or list one of them in data_types.keep_in_fp32_modules."
        )


def _kept_dtypes(buffers: Sequence[_RegisteredBuffer]) -> list[torch.dtype]:
    """Return the dtypes for ``buffers``, which share memory and one of which is kept out of half precision: their own,
    but float32 for floating-point ones if any is registered in a layer with running statistics."""
    statistics = any(isinstance(module, _NormBase) for b in buffers for module, _ in b.places.values())
    return [torch.float32 if statistics and b.tensor.is_floating_point() else b.tensor.dtype for b in buffers]


def _buffer_dtype(buffer: torch.Tensor, policy: PrecisionPolicy) -> torch.dtype:
    """Return the dtype for ``buffer``: that of ``policy`` for buffers if it has one and ``buffer`` is floating-point,
    else the buffer's own."""
    return policy.buffer_dtype if policy.buffer_dtype is not None and buffer.is_floating_point() else buffer.dtype
