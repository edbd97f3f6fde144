"""Write a model as `pytorch_model.bin`, one file or shards with an index. Tied tensors share storage.

[Note: filled frames]
`torch.save` writes the file without its tensors' bytes, from memory that is reserved but never touched. The bytes are
then written where they belong, piece by piece, and the archive's checksums set. So the file is what `torch.save` of the
whole model makes, and the model is never in memory.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..commit import fsync_directory
from ..types import ITEMSIZE
from .dtypes import convert_dtype
from .model import ModelTensor, model_aliases, split_files
from .partial_file import write_at
from .safetensors_sink import write_index
from .sources import Progress, Source, pieces


def write_pytorch(
    source: Source, tensors: list[ModelTensor], target: Path, *, limit: int | None, workers: int, progress: Progress
) -> list[Path]:
    """Write `target` when it ends in `.bin`, `.pt` or `.pth`, otherwise shards into that directory; returns the files.

    Memory is bounded by `workers` times 64 MiB, whatever the size.
    """
    aliases = model_aliases(source, tensors)
    if target.suffix in (".bin", ".pt", ".pth"):
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(source, tensors, aliases, target, workers, progress)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = split_files(tensors, limit, "pytorch_model", ".bin")
    for name, members in files.items():
        _write(source, members, aliases, target / name, workers, progress)
    if len(files) > 1:
        write_index(target / "pytorch_model.bin.index.json", files, aliases)
    return [target / name for name in files]


def _write(
    source: Source, tensors: list[ModelTensor], aliases: dict[str, str], path: Path, workers: int, progress: Progress
) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        places = _write_frame(tensors, aliases, partial)
        fd = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
        try:
            _set_checksums(partial, fd, _fill_all(source, tensors, fd, places, workers, progress))
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def _write_frame(tensors: list[ModelTensor], aliases: dict[str, str], path: Path) -> dict[str, int]:
    """Write the file without the tensors' bytes; returns at which byte those of each tensor belong."""
    import torch

    from ..torch.buffers import torch_dtype
    from .torch_file import load_structure, stored

    state = {tensor.name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype)) for tensor in tensors}
    state.update({alias: state[kept] for alias, kept in aliases.items() if kept in state})
    with torch.serialization.skip_data():
        torch.save(state, path)
    return {name: stored(value, path).begin for name, value in load_structure(path).items() if value.numel()}


def _fill_all(
    source: Source, tensors: list[ModelTensor], fd: int, places: Mapping[str, int], workers: int, progress: Progress
) -> dict[int, int]:
    """Write every tensor's bytes to its place; returns their CRC-32 by place."""
    with ThreadPoolExecutor(workers, thread_name_prefix="zero-ckpt-convert") as pool:
        jobs = {
            places[tensor.name]: pool.submit(_fill, source, tensor, fd, places[tensor.name], progress)
            for tensor in tensors
            if tensor.numel
        }
        try:
            return {begin: job.result() for begin, job in jobs.items()}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _fill(source: Source, tensor: ModelTensor, fd: int, begin: int, progress: Progress) -> int:
    """Write a tensor's bytes from byte `begin` of a file on; returns their CRC-32."""
    found, size = 0, ITEMSIZE[tensor.dtype]
    for offset, length in pieces(source, tensor.name, tensor.kind, tensor.numel, ITEMSIZE[tensor.stored]):
        raw = bytearray(length * ITEMSIZE[tensor.stored])
        source.read_into(tensor.name, tensor.kind, offset, raw)
        data = convert_dtype(raw, tensor.stored, tensor.dtype)
        found = zlib.crc32(data, found)
        write_at(fd, data, begin + offset * size)
        progress(data.nbytes)
    return found


def _set_checksums(path: Path, fd: int, found: Mapping[int, int]) -> None:
    """Set the CRC-32 of the records of a zip file whose data begins at these bytes, in both of their headers."""
    with zipfile.ZipFile(path) as archive:
        entry, records = archive.start_dir, archive.infolist()  # the central directory is in the order of the records
    for record in records:
        local, central = os.pread(fd, 30, record.header_offset), os.pread(fd, 46, entry)
        begin = record.header_offset + 30 + sum(int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
        if begin in found:
            checksum = found[begin].to_bytes(4, "little")
            write_at(fd, checksum, record.header_offset + 14)
            write_at(fd, checksum, entry + 16)
        entry += 46 + sum(int.from_bytes(central[at : at + 2], "little") for at in (28, 30, 32))


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
