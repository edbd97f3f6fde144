"""Write a model as safetensors: one file, or shards with an index, piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from ..commit import fsync_directory, write_durably
from ..safetensors_file import encode_header, read_header
from ..types import ITEMSIZE
from .dtypes import convert_dtype
from .model import ModelTensor, model_aliases, split_files
from .sources import Source, pieces

Progress = Callable[[int], None]


def write_safetensors(
    source: Source,
    tensors: list[ModelTensor],
    target: Path,
    *,
    limit: int | None,
    workers: int,
    progress: Progress,
) -> list[Path]:
    """Write `target` (a `.safetensors` file), or into directory `target` as Hugging Face lays models out.

    Memory is bounded by `workers` times 16 MiB, whatever the size. Files that an interrupted run of the same conversion
    completed are kept. Returns the files.
    """
    aliases = model_aliases(source, tensors)
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_file(source, tensors, target, aliases, workers, progress)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = split_files(tensors, limit, "model", ".safetensors")
    for name, members in files.items():
        own = {alias: kept for alias, kept in aliases.items() if any(member.name == kept for member in members)}
        # a shard that is complete is recognised by what it was made from
        made_from = {"zero_ckpt_source": source.fingerprint} if len(files) > 1 else {}
        _write_file(source, members, target / name, {**own, **made_from}, workers, progress)
    if len(files) > 1:
        write_index(target / "model.safetensors.index.json", files)
    return [target / name for name in files]


def write_index(path: Path, files: object) -> None:
    """The index that tells loaders in which shard each tensor is."""
    table: dict[str, list[ModelTensor]] = dict(files)  # type: ignore[call-overload]
    index = {
        "metadata": {"total_size": sum(member.nbytes for members in table.values() for member in members)},
        "weight_map": {member.name: name for name, members in table.items() for member in members},
    }
    write_durably(path, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def _write_file(
    source: Source,
    tensors: list[ModelTensor],
    path: Path,
    notes: dict[str, str],
    workers: int,
    progress: Progress,
) -> None:
    metadata = {"format": "pt", **notes}
    ordered = sorted(tensors, key=lambda tensor: -ITEMSIZE[tensor.dtype])
    header, nbytes = encode_header(((item.name, item.dtype, item.shape) for item in ordered), metadata)
    if "zero_ckpt_source" in notes and path.is_file() and read_header(path) == (header, nbytes):
        progress(sum(tensor.nbytes for tensor in tensors))
        return
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.truncate(fd, nbytes)
        _write_at(fd, header, 0)
        _copy_all(source, ordered, fd, len(header), workers, progress)
        os.fsync(fd)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    partial.replace(path)
    fsync_directory(path.parent)


def _copy_all(
    source: Source, tensors: list[ModelTensor], fd: int, begin: int, workers: int, progress: Progress
) -> None:
    pending: set[Future[int]] = set()
    with ThreadPoolExecutor(workers, thread_name_prefix="zero-ckpt-convert") as pool:
        try:
            for tensor, offset, length, position in _chunks(source, tensors, begin):
                pending.add(pool.submit(_copy, source, tensor, offset, length, fd, position))
                if len(pending) >= 4 * workers:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for job in done:
                        progress(job.result())
            for job in pending:
                progress(job.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _chunks(source: Source, tensors: list[ModelTensor], position: int) -> Iterator[tuple[ModelTensor, int, int, int]]:
    """(tensor, first element, elements, byte position in the file) of every piece to copy."""
    for tensor in tensors:
        size = ITEMSIZE[tensor.dtype]
        for offset, length in pieces(source, tensor.name, tensor.kind, tensor.numel, ITEMSIZE[tensor.stored]):
            yield tensor, offset, length, position + offset * size
        position += tensor.nbytes


def _copy(source: Source, tensor: ModelTensor, offset: int, length: int, fd: int, position: int) -> int:
    raw = bytearray(length * ITEMSIZE[tensor.stored])
    source.read_into(tensor.name, tensor.kind, offset, raw)
    data = convert_dtype(raw, tensor.stored, tensor.dtype)
    _write_at(fd, data, position)
    return data.nbytes


def _write_at(fd: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written
