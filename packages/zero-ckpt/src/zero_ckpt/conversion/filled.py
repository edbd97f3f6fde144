"""Files of `torch.save` whose tensors are never in memory.

[Note: filled templates]
`torch.save` writes the file without its tensors' bytes, from memory that is reserved but never touched. The bytes are
then written where they belong, piece by piece, and the archive's checksums set. So the file is what `torch.save` of the
whole would make. Until it is complete it is called `<name>.partial`.
"""

from __future__ import annotations

import os
import pickle
import traceback
import zipfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..types import ITEMSIZE
from .checks import move_into_place
from .dtypes import convert_dtype
from .model import ModelTensor
from .partial_file import write_at
from .record import RECORD_BYTES, ConversionRecord
from .sources import PIECE_BYTES, Progress, Source, pieces


@dataclass(frozen=True)
class FileTemplate:
    """A file that is to be written to `path`: `value` is what `torch.save` is given, and `tensors` say, by name, where
    its tensors' bytes come from.

    `find` is called with the value after it was loaded, and returns its tensors by the same names. A tensor whose kind
    the source does not have is zeros. `pickling`: the module that `torch.save` pickles with.
    """

    path: Path
    value: Any
    tensors: Mapping[str, ModelTensor]
    find: Callable[[Any], Mapping[str, Any]]
    pickling: Any = pickle


def empty_tensor(tensor: ModelTensor) -> Any:
    """Return a torch tensor with the shape and output dtype of `tensor`, whose memory is reserved and never touched."""
    import torch

    from ..torch.buffers import torch_dtype

    return torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))


def write_filled(
    source: Source,
    template: FileTemplate,
    record: ConversionRecord,
    *,
    workers: int,
    progress: Progress,
    overwrite: bool,
) -> None:
    """Write the file that `template` describes, with bytes from `source`, resuming from `record`, and record that it is
    complete.

    A file that is complete already is only counted as progress. `workers` tensors are written at a time; `progress` is
    called with bytes written, from several threads. After an exception the unfinished file is removed; after an
    interrupt it stays, to be continued. Raises CheckpointError when another file has its name by then, unless
    `overwrite`.
    """
    name = template.path.relative_to(record.folder).as_posix()
    if record.is_complete(name):
        progress(sum(tensor.nbytes for tensor in template.tensors.values()))
        return
    partial = template.path.with_name(template.path.name + ".partial")
    done = record.done(name) if partial.is_file() else {}
    try:
        if not done:
            _write_template(template, partial)
        places = _places(template, partial)
        fd = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:

            def note(tensors: dict[str, int], nbytes: int, fd: int = fd) -> None:
                """Sync the file's data, then record that `tensors` (name to CRC-32) are on disk, `nbytes` bytes more
                than before."""
                os.fdatasync(fd)
                record.note(name, dict(tensors), nbytes)

            _fill_all(source, template, fd, places, done, note, workers, progress)
            _set_checksums(partial, fd, {places[key]: found for key, found in done.items()})
            os.fsync(fd)
            nbytes = sum(tensor.nbytes for tensor in template.tensors.values())
            record.complete(name, os.fstat(fd), nbytes, now=not overwrite)
        finally:
            os.close(fd)
        move_into_place(partial, template.path, overwrite)
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def write_new(source: Source, template: FileTemplate, *, workers: int) -> None:
    """Write the file that `template` describes, with bytes from `source`, `workers` tensors at a time, without a record
    or a temporary name; it is on disk on return. For a directory in which nobody looks yet.

    Raises CheckpointError when torch cannot write it, and OSError.
    """
    done: dict[str, int] = {}
    _write_template(template, template.path)
    places = _places(template, template.path)
    fd = os.open(template.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _fill_all(source, template, fd, places, done, lambda *_: None, workers, lambda _: None)
        _set_checksums(template.path, fd, {places[key]: found for key, found in done.items()})
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_template(template: FileTemplate, partial: Path) -> None:
    """Write the file of `template` without its tensors' bytes to `partial`, making the directory that this lies in.
    Raises CheckpointError when torch cannot write it."""
    import torch

    template.path.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)  # it may be a link to elsewhere
    try:
        with torch.serialization.skip_data():
            torch.save(template.value, partial, pickle_module=template.pickling)
    except RuntimeError as error:  # torch does not say what the system answered
        held: BaseException | None = error
        while held is not None:  # torch's writer, which holds the file open, is in the frames
            traceback.clear_frames(held.__traceback__)
            held = held.__context__
        raise CheckpointError(f"{partial} cannot be written; is there no space left? torch says: {error}") from error


def _places(template: FileTemplate, partial: Path) -> dict[str, int]:
    """Return, by name, the byte of the file `partial` at which the data of each non-empty tensor of `template` begins.

    Raises CheckpointError when the file does not hold the template's tensors.
    """
    from .torch_file import load_structure, stored

    found = template.find(load_structure(partial))
    if set(found) != set(template.tensors):
        raise CheckpointError(f"{partial} is not what an earlier run should have left; remove it")
    return {name: stored(value, partial).begin for name, value in found.items() if value.numel()}


def _fill_all(
    source: Source,
    template: FileTemplate,
    fd: int,
    places: Mapping[str, int],
    done: dict[str, int],
    note: Callable[[dict[str, int], int], None],
    workers: int,
    progress: Progress,
) -> None:
    """Write the bytes of every tensor of `template` that is not in `done` to its place in the file `fd`, and add its
    CRC-32 to `done`.

    `places` has the first byte of each tensor by name. `workers` tensors are written at a time, and `progress` is
    called with bytes written. `note` is called with `done` and the bytes since its last call, every 256 MiB and on an
    interrupt.
    """
    progress(sum(template.tensors[name].nbytes for name in done))
    unrecorded = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="zero-ckpt-convert") as pool:
        jobs = {
            pool.submit(_fill, source, template.tensors[name], fd, begin, progress): name
            for name, begin in places.items()
            if name not in done
        }
        try:
            for job in as_completed(jobs):
                done[jobs[job]] = job.result()
                unrecorded += template.tensors[jobs[job]].nbytes
                if unrecorded >= RECORD_BYTES:
                    note(done, unrecorded)
                    unrecorded = 0
        except BaseException as error:
            pool.shutdown(wait=True, cancel_futures=True)
            if not isinstance(error, Exception):
                note(done, unrecorded)
            raise


def _fill(source: Source, tensor: ModelTensor, fd: int, begin: int, progress: Progress) -> int:
    """Write a tensor of `source` from byte `begin` of the file `fd` on, converted to its output dtype piece by piece;
    return the CRC-32 of the bytes written.

    A tensor that the source does not have is zeros, which the file holds already: nothing is written. `progress` is
    called with the number of bytes of each piece in the output, also for zeros.
    """
    found, size = 0, ITEMSIZE[tensor.dtype]
    if (tensor.name, tensor.kind) not in source.tensors:
        return _crc_of_zeros(tensor.nbytes, progress)
    for offset, length in pieces(source, tensor.name, tensor.kind, tensor.numel, ITEMSIZE[tensor.stored]):
        raw = bytearray(length * ITEMSIZE[tensor.stored])
        source.read_into(tensor.name, tensor.kind, offset, raw)
        data = convert_dtype(raw, tensor.stored, tensor.dtype)
        found = zlib.crc32(data, found)
        write_at(fd, data, begin + offset * size)
        progress(data.nbytes)
    return found


def _crc_of_zeros(nbytes: int, progress: Progress) -> int:
    """Return the CRC-32 of `nbytes` zeros, which a new file holds already; nothing is written. Calls `progress` with
    `nbytes`."""
    found, zeros = 0, bytes(min(nbytes, PIECE_BYTES))
    for begin in range(0, nbytes, PIECE_BYTES):
        found = zlib.crc32(zeros[: nbytes - begin], found)
    progress(nbytes)
    return found


def _set_checksums(path: Path, fd: int, found: Mapping[int, int]) -> None:
    """Set the CRC-32 of records of the zip file `path`, open as `fd`, in both of their headers.

    `found` has the CRC-32 by the byte at which a record's data begins; other records are left.
    """
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
