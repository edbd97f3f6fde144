"""Buffers and replicated parameters of a model: the same on every rank, on the compute device."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from zero_comm import EngineGroups, Tag
from zero_precision import PrecisionPolicy

from .host_facts import is_plain


def share_buffers(
    model: nn.Module,
    groups: EngineGroups,
    device: torch.device,
    *,
    policy: PrecisionPolicy,
    kept_fp32: Container[str],
    replicated: Container[str],
) -> None:
    """Move buffers and the ``replicated`` parameters to ``device``, with rank 0's values. Collective.

    In half precision buffers get the parameters' dtype, as in ``model.to(dtype)``, unless ``policy`` has another for
    them; those in ``kept_fp32`` keep theirs. Names are the model's.
    """
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            kept = (f"{name}.{key}" if name else key) in kept_fp32
            dtype = buffer.dtype if kept else _buffer_dtype(buffer, policy)
            moved = buffer.to(device, dtype)
            sent = moved.contiguous()
            groups.broadcast(sent, 0, Tag("broadcast", f"{name}.{key}"))
            if sent is not moved and all(moved.stride()):
                moved.copy_(sent)  # it may share its memory with another buffer
            elif sent is not moved:
                moved = sent
            if moved is not buffer:
                module._buffers[key] = moved
    for name, parameter in model.named_parameters():
        if name in replicated and is_plain(parameter.data) and parameter.numel():
            parameter.data = parameter.data.to(device).contiguous()
            groups.broadcast(parameter.data, 0, Tag("broadcast", name))


def _buffer_dtype(buffer: torch.Tensor, policy: PrecisionPolicy) -> torch.dtype:
    """Return the dtype for a buffer: the one that ``policy`` has for buffers, else in half precision the parameters';
    in other precisions, and if it is not floating point, its own."""
    if not buffer.is_floating_point():
        return buffer.dtype
    if policy.buffer_dtype is not None:
        return policy.buffer_dtype
    return policy.param_dtype if policy.param_dtype.itemsize < 4 else buffer.dtype
