"""Write a model as `pytorch_model.bin`, one file or shards with an index. Tied tensors share storage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..commit import fsync_directory
from ..types import ITEMSIZE
from .dtypes import convert_dtype
from .model import ModelTensor, model_aliases, split_files
from .safetensors_sink import write_index
from .sources import Progress, Source, pieces

if TYPE_CHECKING:
    import torch


def write_pytorch(
    source: Source, tensors: list[ModelTensor], target: Path, *, limit: int | None, progress: Progress
) -> list[Path]:
    """Write `target` when it ends in `.bin`, `.pt` or `.pth`, otherwise shards into that directory; returns the files.

    One file's tensors are in memory at a time.
    """
    aliases = model_aliases(source, tensors)
    if target.suffix in (".bin", ".pt", ".pth"):
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(source, tensors, aliases, target, progress)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = split_files(tensors, limit, "pytorch_model", ".bin")
    for name, members in files.items():
        _write(source, members, aliases, target / name, progress)
    if len(files) > 1:
        write_index(target / "pytorch_model.bin.index.json", files, aliases)
    return [target / name for name in files]


def _write(source: Source, tensors: list[ModelTensor], aliases: dict[str, str], path: Path, progress: Progress) -> None:
    import torch

    state: dict[str, torch.Tensor] = {tensor.name: read_model_tensor(source, tensor, progress) for tensor in tensors}
    state.update({alias: state[kept] for alias, kept in aliases.items() if kept in state})
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def read_model_tensor(source: Source, tensor: ModelTensor, progress: Progress) -> Any:
    """One tensor of a model in new memory, in its output dtype."""
    import torch

    from ..torch.buffers import tensor_buffer, torch_dtype

    whole = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
    view, size = tensor_buffer(whole), ITEMSIZE[tensor.dtype]
    for offset, length in pieces(source, tensor.name, tensor.kind, tensor.numel, ITEMSIZE[tensor.stored]):
        target = view[offset * size : (offset + length) * size]
        if tensor.dtype == tensor.stored:
            source.read_into(tensor.name, tensor.kind, offset, target)
        else:
            raw = bytearray(length * ITEMSIZE[tensor.stored])
            source.read_into(tensor.name, tensor.kind, offset, raw)
            target[:] = convert_dtype(raw, tensor.stored, tensor.dtype)
        progress(target.nbytes)
    return whole
