"""Write a model as `pytorch_model.bin`, one file or shards with an index. Tied tensors share storage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checksum import checksum
from ..durable import make_directories
from ..types import ITEMSIZE
from .checks import refuse_existing, refuse_folder, refuse_other, require_folder, require_torch
from .dtypes import convert_dtype
from .filled import FileTemplate, empty_tensor, write_filled
from .model import ModelTensor, model_aliases, split_files
from .record import ConversionRecord
from .safetensors_sink import encode_index, write_index
from .sources import Progress, Source, pieces


def write_pytorch(
    source: Source,
    tensors: list[ModelTensor],
    target: Path,
    *,
    limit: int | None,
    workers: int,
    progress: Progress,
    overwrite: bool = False,
) -> list[Path]:
    """Write `target` when it ends in `.bin`, `.pt` or `.pth`, otherwise shards into that directory, and return the
    files.

    Shards hold up to `limit` bytes each (None: one file), and `progress` is called with bytes written, from several
    threads. Memory is bounded by `workers` times 64 MiB, whatever the size. An interrupted run resumes (see [Note:
    records of conversions]). Raises CheckpointError, before anything is written, when torch is not installed or a file
    exists that this conversion has not made, unless `overwrite`.
    """
    require_torch(f"writing {target} as torch.save does")
    aliases = model_aliases(source, tensors)
    is_file = target.suffix in (".bin", ".pt", ".pth")
    folder = target.parent if is_file else target
    require_folder(folder)
    make_directories(folder)
    files: Mapping[str, list[ModelTensor]] = {target.name: tensors}
    if not is_file:
        files = split_files(tensors, limit, "pytorch_model", ".bin")
    wanted = [(name, [(item.name, item.dtype) for item in members]) for name, members in files.items()]
    index, contents = folder / "pytorch_model.bin.index.json", encode_index(files, aliases)
    made_from = checksum(repr((source.fingerprint, wanted, sorted(aliases.items()))).encode())
    record = ConversionRecord(folder / f".{target.name}.conversion", made_from)
    try:
        for name in files:
            if not record.is_complete(name):
                refuse_existing(folder / name, overwrite)
                refuse_folder(folder / name)
        if len(files) > 1:
            refuse_other(index, contents, overwrite)
        for name, members in files.items():
            template = _template(folder / name, members, aliases)
            write_filled(source, template, record, workers=workers, progress=progress, overwrite=overwrite)
        if len(files) > 1:
            write_index(index, contents, overwrite)
    except BaseException as error:
        record.close(keep=not isinstance(error, Exception))  # an interrupted run can resume
        raise
    record.close(keep=False)
    return [folder / name for name in files]


def _template(path: Path, tensors: list[ModelTensor], aliases: Mapping[str, str]) -> FileTemplate:
    """Return the template of the file at `path`, which is to hold `tensors` and, of `aliases` (tied name to stored
    name), the tied names of these tensors."""
    members = {tensor.name: tensor for tensor in tensors}
    state: dict[str, Any] = {name: empty_tensor(tensor) for name, tensor in members.items()}
    state.update({alias: state[kept] for alias, kept in aliases.items() if kept in state})
    return FileTemplate(path, state, members, lambda loaded: {name: loaded[name] for name in members if name in loaded})


def read_model_tensor(source: Source, tensor: ModelTensor, progress: Progress) -> Any:
    """Return one tensor of a model in new CPU memory, in its output dtype; `progress` is called with its bytes, piece
    by piece."""
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
