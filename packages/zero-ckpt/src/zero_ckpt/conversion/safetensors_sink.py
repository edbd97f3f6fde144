"""Write a model as safetensors: one file, or shards with an index, piece by piece."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..durable import make_directories, replace_durably
from ..errors import DamagedError
from ..safetensors_file import encode_header, read_header
from ..types import ITEMSIZE
from .checks import refuse_existing, refuse_folder, refuse_other, require_folder
from .dtypes import convert_dtype
from .model import ModelTensor, model_aliases, split_files
from .partial_file import PartialFile
from .record import RECORD_BYTES
from .sources import Progress, Source, pieces

_SOURCE = "zero_ckpt_source"


def write_safetensors(
    source: Source,
    tensors: list[ModelTensor],
    target: Path,
    *,
    limit: int | None,
    workers: int,
    progress: Progress,
    overwrite: bool = False,
) -> list[Path]:
    """Write the tensors of a model as `target`, a `.safetensors` file, or into the directory `target` as Hugging Face
    lays models out, and return the files.

    Files of a directory hold up to `limit` bytes each (None: one file), and `progress` is called with bytes written.
    Memory is bounded by `workers` times 64 MiB, whatever the size. An interrupted run resumes: shards that are complete
    are kept, and an unfinished file is continued where it was (see [Note: resumable files]). Raises CheckpointError,
    before anything is written, when a file exists that this conversion has not made, unless `overwrite`.
    """
    aliases = model_aliases(source, tensors)
    if target.suffix == ".safetensors":
        require_folder(target.parent)
        refuse_existing(target, overwrite)
        refuse_folder(target)
        make_directories(target.parent)
        _write_file(source, tensors, target, aliases, workers, progress, overwrite)
        return [target]
    require_folder(target)
    files = split_files(tensors, limit, "model", ".safetensors")
    index, contents = target / "model.safetensors.index.json", encode_index(files, {})
    notes: dict[str, dict[str, str]] = {}
    for name, members in files.items():
        own = {alias: kept for alias, kept in aliases.items() if any(member.name == kept for member in members)}
        # a shard that is complete is recognised by what it was made from
        notes[name] = {**own, **({_SOURCE: source.fingerprint} if len(files) > 1 else {})}
        if not _is_complete(target / name, members, notes[name]):
            refuse_existing(target / name, overwrite)
            refuse_folder(target / name)
    if len(files) > 1:
        refuse_other(index, contents, overwrite)
    make_directories(target)
    for name, members in files.items():
        _write_file(source, members, target / name, notes[name], workers, progress, overwrite)
    if len(files) > 1:
        write_index(index, contents, overwrite)
    return [target / name for name in files]


def encode_index(files: Mapping[str, list[ModelTensor]], aliases: Mapping[str, str]) -> bytes:
    """Return the contents of the index that tells loaders the file of each tensor; a tied name has the file of its
    tensor.

    `files` has the tensors by file name, `aliases` the tied names with the name of their tensor.
    """
    weight_map = {member.name: name for name, members in files.items() for member in members}
    weight_map.update({alias: weight_map[kept] for alias, kept in aliases.items()})
    total = sum(member.nbytes for members in files.values() for member in members)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def write_index(path: Path, contents: bytes, overwrite: bool) -> None:
    """Write the index `contents` to `path`, on disk on return. Raises CheckpointError when a file with other contents
    is there, unless `overwrite`."""
    try:
        replace_durably(path, contents, overwrite=overwrite)
    except FileExistsError:
        refuse_other(path, contents, overwrite)


def _write_file(
    source: Source,
    tensors: list[ModelTensor],
    path: Path,
    notes: dict[str, str],
    workers: int,
    progress: Progress,
    overwrite: bool,
) -> None:
    """Write `tensors` into a file at `path`, or continue the file where an interrupted run stopped. If an earlier run
    has completed it, nothing is written and `progress` gets its bytes.

    `notes` become metadata of its header. `workers` pieces are copied at a time; `progress` is called with bytes
    written. Raises CheckpointError when there is another file, unless `overwrite`.
    """
    ordered, header, nbytes = _layout(tensors, notes)
    if _is_complete(path, tensors, notes):
        progress(sum(tensor.nbytes for tensor in tensors))
        return
    file = PartialFile(path, nbytes, source.fingerprint.encode() + header)
    try:
        refuse_existing(path, overwrite)  # another conversion may have ended before this one had the lock
        file.write(header, 0)
        _copy_all(source, _chunks(source, ordered, len(header)), file, workers, progress)
        file.finish(overwrite=overwrite)
    except BaseException as error:
        file.abort(keep=not isinstance(error, Exception))  # an interrupted run can resume
        raise


def _layout(tensors: list[ModelTensor], notes: dict[str, str]) -> tuple[list[ModelTensor], bytes, int]:
    """Return (the tensors in the order of the file, the file's header, the file's size in bytes); `notes` become
    metadata of the header."""
    ordered = sorted(tensors, key=lambda tensor: -ITEMSIZE[tensor.dtype])
    header, nbytes = encode_header(((item.name, item.dtype, item.shape) for item in ordered), {"format": "pt", **notes})
    return ordered, header, nbytes


def _is_complete(path: Path, tensors: list[ModelTensor], notes: dict[str, str]) -> bool:
    """Return whether an earlier run of this conversion completed the file at `path`: the file has its full size, and
    the header for `tensors` and `notes`, which name the source.

    False where `notes` do not name the source, as for a single file.
    """
    if _SOURCE not in notes or not path.is_file():
        return False
    try:
        return read_header(path) == _layout(tensors, notes)[1:]
    except DamagedError:
        return False


def _copy_all(source: Source, chunks: Iterator[_Chunk], file: PartialFile, workers: int, progress: Progress) -> None:
    """Copy the chunks that `file` does not hold yet from `source`, `workers` at a time.

    They finish in order, so that what is done is one byte position, which is recorded in the file every 256 MiB.
    `progress` is called with the bytes of each chunk, those that were there included.
    """
    pending: deque[tuple[_Chunk, Future[None]]] = deque()
    recorded, recording = file.done, Future[None]()
    recording.set_result(None)
    with (
        ThreadPoolExecutor(workers, thread_name_prefix="zero-ckpt-convert") as pool,
        ThreadPoolExecutor(1, thread_name_prefix="zero-ckpt-record") as recorder,
    ):
        try:
            for chunk in chunks:
                if chunk.end <= file.done:
                    progress(chunk.nbytes)
                    continue
                pending.append((chunk, pool.submit(_copy, source, chunk, file)))
                if len(pending) < 4 * workers:
                    continue
                done = _finish_first(pending, progress)
                if done - recorded >= RECORD_BYTES and recording.done():
                    recording.result()
                    recording, recorded = recorder.submit(file.record, done), done
            while pending:
                _finish_first(pending, progress)
            recording.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _finish_first(pending: deque[tuple[_Chunk, Future[None]]], progress: Progress) -> int:
    """Wait for the oldest chunk, take it off `pending` and call `progress` with its bytes. Returns the byte position in
    the file at which it ends."""
    chunk, job = pending.popleft()
    job.result()
    progress(chunk.nbytes)
    return chunk.end


@dataclass(frozen=True)
class _Chunk:
    """`length` elements of a tensor from flat element `offset` on, to be written at byte `position` of the file.

    `nbytes` and `end` are in bytes of the output.
    """

    tensor: ModelTensor
    offset: int
    length: int
    position: int

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's elements in the output."""
        return self.length * ITEMSIZE[self.tensor.dtype]

    @property
    def end(self) -> int:
        """The position in the output behind the chunk's last byte."""
        return self.position + self.nbytes


def _chunks(source: Source, tensors: list[ModelTensor], position: int) -> Iterator[_Chunk]:
    """Yield all chunks of `tensors`, to be copied in this order. The tensors lie in the output file one after the other
    from byte `position` on."""
    for tensor in tensors:
        size = ITEMSIZE[tensor.dtype]
        for offset, length in pieces(source, tensor.name, tensor.kind, tensor.numel, ITEMSIZE[tensor.stored]):
            yield _Chunk(tensor, offset, length, position + offset * size)
        position += tensor.nbytes


def _copy(source: Source, chunk: _Chunk, file: PartialFile) -> None:
    """Read a chunk from `source`, convert its dtype, and write it to its position in the output file."""
    tensor = chunk.tensor
    raw = bytearray(chunk.length * ITEMSIZE[tensor.stored])
    source.read_into(tensor.name, tensor.kind, chunk.offset, raw)
    file.write(convert_dtype(raw, tensor.stored, tensor.dtype), chunk.position)
