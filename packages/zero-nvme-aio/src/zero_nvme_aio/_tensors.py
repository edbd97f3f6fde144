"""Saves and loads safetensors files through the engine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import _buffers, _header
from ._engine import Engine
from ._file import File
from ._frameworks import choose_framework, dtype_and_shape, view
from ._header import TensorInfo
from ._memory import AlignedBuffer
from .errors import FormatError, InvalidBufferError

__all__ = ["load", "save"]

SINGLE = "tensor"
_SINGLE_MARK = "zero_nvme_aio.single"


def save(
    path: str | os.PathLike[str],
    tensors: Any,
    *,
    metadata: Mapping[str, str] | None = None,
    sync: bool = True,
    engine: Engine | None = None,
) -> None:
    """Write one tensor, or a mapping of names to tensors, as a safetensors file that is either complete or absent.

    Tensors: torch, NumPy or bytes-like, C-contiguous, in host memory. `metadata`: strings to strings. The file is
    written beside `path` and renamed; with `sync` it is on stable storage when this returns. Raises InvalidBufferError,
    NoSpaceError, MissingPathError and the other errors of the engine.
    """
    target = os.fspath(path)
    marks = dict(metadata or {})
    if not isinstance(tensors, Mapping):
        tensors, marks = {SINGLE: tensors}, {**marks, _SINGLE_MARK: "1"}
    entries, items = _layout(tensors)
    header = _header.build(entries, marks)
    scratch = f"{target}.{secrets.token_hex(4)}.part"
    with _given_or_new_engine(engine) as io:
        try:
            with io.open(scratch, "w") as file:
                io.submit_items(True, file, [memoryview(header), *items], 0, False).wait()
                if sync:
                    io.sync(file)
            os.replace(scratch, target)
        except BaseException:
            if os.path.exists(scratch):
                os.unlink(scratch)
            raise
    if sync:
        sync_folder(os.path.dirname(target) or ".")


def load(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    framework: str = "auto",
    out: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
) -> Any:
    """Read a safetensors file; return a dict of tensors, or the tensor itself if `save` was given one.

    `names`: load only these; by default all, or those in `out`. `framework`: "torch", "numpy", "memoryview" (bytes), or
    "auto": torch if it is already imported, else NumPy if installed. `out`: buffers by name, each of exactly its
    tensor's bytes, which are filled and returned instead of new tensors. Tensors that are adjacent in the file share
    one AlignedBuffer. Raises FormatError, EndOfFileError, MissingPathError, KeyError for a name that is not in the
    file, InvalidBufferError for a destination of another size, AioError for a dtype that the framework lacks.
    """
    chosen = choose_framework(framework)
    with _given_or_new_engine(engine) as io, io.open(path) as file:
        start, entries, metadata = read_header(io, file)
        wanted = _entries_named(file.path, entries, names if names is not None else out)
        if out is not None:
            _read_into(io, file, start, wanted, out)
            return {entry.name: out[entry.name] for entry in wanted}
        tensors = _read_fresh(io, file, start, wanted, chosen)
    if metadata.get(_SINGLE_MARK) == "1" and names is None and list(tensors) == [SINGLE]:
        return tensors[SINGLE]
    return tensors


def read_header(io: Engine, file: File) -> tuple[int, list[TensorInfo], dict[str, str]]:
    """Read the header of an open safetensors file through the engine `io`; return the offset of the data in the file
    (bytes), the entries in file order, and the metadata. FormatError if the file is not safetensors.
    """
    size = file.size
    first = bytearray(min(size, _header.PAGE))
    io.read(file, first, 0).wait()
    start = _header.header_length(file.path, bytes(first[:8]), size)
    if start > len(first):
        rest = bytearray(start - len(first))
        io.read(file, rest, len(first)).wait()
        first += rest
    entries, metadata = _header.parse(file.path, bytes(first[8:start]), size - start)
    return start, entries, metadata


def sync_folder(folder: str) -> None:
    """Sync a folder, so that renames and new names in it survive a crash; OSError if that fails."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _given_or_new_engine(given: Engine | None) -> Iterator[Engine]:
    """Return a context manager that yields the engine `given`, which stays open, or, if that is None, a new engine that
    is closed afterwards.
    """
    if given is not None:
        yield given
        return
    with Engine() as own:
        yield own


def _layout(tensors: Mapping[str, Any]) -> tuple[list[TensorInfo], list[Any]]:
    """Return the header entries of the tensors, and their memory in the same order, as `_buffers.describe` describes
    it: widest elements first, then by name. InvalidBufferError names a tensor that cannot be saved.
    """
    described = []
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise InvalidBufferError(f"expected tensor names to be strings other than '__metadata__', got {name!r}")
        dtype, shape = dtype_and_shape(name, tensor)
        try:
            described.append((name, dtype, shape, _buffers.describe(tensor, False)))
        except InvalidBufferError as error:
            raise InvalidBufferError(f"tensor '{name}': {error}") from None
    # Wide elements first, so that every tensor is aligned to its own element size.
    described.sort(key=lambda d: (-_header.ITEM_BITS[d[1]], d[0]))
    entries, position = [], 0
    for name, dtype, shape, item in described:
        end = position + _buffers.nbytes_of(item)
        entries.append(TensorInfo(name, dtype, shape, position, end))
        position = end
    return entries, [item for *_, item in described]


def _entries_named(path: str, entries: list[TensorInfo], names: Iterable[str] | None) -> list[TensorInfo]:
    """Return the entries with these names (None: all), in file order; KeyError, naming `path`, for a missing one."""
    if names is None:
        return entries
    wanted = set(names)
    chosen = [entry for entry in entries if entry.name in wanted]
    missing = wanted.difference(entry.name for entry in chosen)
    if missing:
        raise KeyError(f"'{path}' has no tensor {', '.join(map(repr, sorted(missing)))}")
    return chosen


def _read_into(io: Engine, file: File, start: int, entries: list[TensorInfo], out: Mapping[str, Any]) -> None:
    """Read each entry's data from the file into the buffer of its name in `out`; return when all have been read.
    `start`: the offset of the data in the file. InvalidBufferError if a buffer has another size or cannot be used.
    """
    requests = []
    for entry in entries:
        item = _buffers.describe(out[entry.name], True)
        if _buffers.nbytes_of(item) != entry.nbytes:
            raise InvalidBufferError(
                f"tensor '{entry.name}' has {entry.nbytes} bytes in '{file.path}', "
                f"its destination {_buffers.nbytes_of(item)}",
                path=file.path,
                expected=entry.nbytes,
                got=_buffers.nbytes_of(item),
            )
        requests.append(io.read(file, [out[entry.name]], start + entry.begin))
    for request in requests:
        request.wait()


def _read_fresh(io: Engine, file: File, start: int, entries: list[TensorInfo], framework: str) -> dict[str, Any]:
    """Read the entries' data into new memory; return tensors of `framework` ("torch", "numpy" or "memoryview") by name.
    Entries that are adjacent in the file share one AlignedBuffer. `start`: the offset of the data in the file.
    """
    requests = []
    pieces: dict[str, tuple[TensorInfo, memoryview, bool]] = {}
    for run in _adjacent_runs(entries):
        begin, end = start + run[0].begin, start + run[-1].end
        # The memory is as far from a page as the file offset is, so that direct I/O needs no copy.
        lead = begin % _header.PAGE
        memory = memoryview(AlignedBuffer(lead + end - begin))[lead:]
        requests.append(io.read(file, memory, begin))
        for entry in run:
            piece = memory[start + entry.begin - begin : start + entry.end - begin]
            # A file by others may place a tensor off its element size; only then is it copied, after reading.
            misplaced = (start + entry.begin) % max(1, _header.ITEM_BITS[entry.dtype] // 8) != 0
            pieces[entry.name] = (entry, piece, misplaced)
    for request in requests:
        request.wait()
    return {name: _make_tensor(framework, *found) for name, found in pieces.items()}


def _make_tensor(framework: str, entry: TensorInfo, piece: memoryview, misplaced: bool) -> Any:
    """Return an entry's tensor over the bytes `piece`, which it keeps alive. `framework`: "torch", "numpy", or
    "memoryview", for which `piece` itself is returned.

    `misplaced`: `piece` is not aligned to the element size; then torch and NumPy get an aligned copy. FormatError if no
    tensor of this shape can be made of the bytes; AioError if the framework lacks the dtype.
    """
    if misplaced and framework != "memoryview":
        copy = memoryview(AlignedBuffer(len(piece)))
        copy[:] = piece
        piece = copy
    try:
        return view(framework, entry.name, entry.dtype, entry.shape, piece)
    except (ValueError, RuntimeError) as error:  # NumPy's, and torch's for a shape whose product overflows
        raise FormatError(f"tensor '{entry.name}' cannot be made of its bytes: {error}") from None


def _adjacent_runs(entries: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Yield the entries, which are in file order, in lists of those that follow each other without a gap."""
    run: list[TensorInfo] = []
    for entry in entries:
        if run and entry.begin != run[-1].end:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
