"""Torch distributed checkpoints (DCP) as a source.

Their `.metadata` is a pickle. It is read with an unpickler that knows only the few classes of which such metadata is
made; tensors are then read in place from the `.distcp` files.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from ..errors import CheckpointError, DamagedError
from ..opened import read_bounded
from ..torch.buffers import dtype_name
from ..types import ITEMSIZE, numel
from .segments import Segment, SegmentedTensor, SegmentSource

_MAX_METADATA_BYTES = 256 << 20
_REFUSED_OPCODES = frozenset(
    opcode[0]
    for opcode in (
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.PERSID, pickle.BINPERSID),
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ),
    )
)
_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))

_ALLOWED = {
    "builtins": {"dict", "list", "set", "tuple", "slice"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "device", "dtype", "strided", "contiguous_format", "preserve_format", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix", "StorageMeta"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _Unpickler(pickle._Unpickler):
    """Knows the classes of DCP metadata, and dtypes, and nothing else.

    It is the standard library's unpickler in Python: the one in C asks for the memory that an opcode declares (a byte
    array of a terabyte, memo entry 2**31) before it has seen the bytes.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in _REFUSED_OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")


def open_dcp(directory: Path) -> SegmentSource:
    """Open a torch distributed checkpoint directory.

    A key such as `model.layer.weight` is the parameter `layer.weight` when all tensors of the checkpoint that are not
    the optimizer's share that first part; `optimizer.state.<name>.<kind>` becomes the parameter's state.
    """
    path = directory / ".metadata"
    try:
        metadata = _Unpickler(io.BytesIO(_read_metadata(path))).load()
        sizes = dict(metadata.state_dict_metadata)
        stored = [(index.fqn, tuple(index.offset or ()), info) for index, info in metadata.storage_data.items()]
    except CheckpointError:
        raise
    except Exception as error:  # a pickle made to hurt can raise anything from what it calls
        raise DamagedError(f"{path}: {type(error).__name__}: {error}") from error
    found = {key: value for key, value in sizes.items() if hasattr(value, "chunks")}
    names = _names(list(found))
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for key, offset, info in stored:
        places.setdefault(key, {})[offset] = info
    tensors = {names[key]: _tensor(directory, key, value, places.get(key, {})) for key, value in found.items()}
    return SegmentSource(tensors, {}, 0, None)


def _read_metadata(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_bounded(fd, _MAX_METADATA_BYTES, str(path))
    finally:
        os.close(fd)


def _names(keys: list[str]) -> dict[str, tuple[str, str]]:
    """(name, kind) of every key."""
    optimizer = [key for key in keys if ".state." in key and key.startswith(("optim.", "optimizer."))]
    model = [key for key in keys if key not in optimizer]
    firsts = {key.split(".", 1)[0] for key in model}
    strip = len(firsts) == 1 and firsts <= {"model", "module", "app", "state_dict"} and all("." in key for key in model)
    names = {key: (key.split(".", 1)[1] if strip else key, "param") for key in model}
    for key in optimizer:
        name, _, kind = key.split(".state.", 1)[1].rpartition(".")
        names[key] = (name, kind)
    return names


def _tensor(directory: Path, key: str, value: Any, places: dict[tuple[int, ...], Any]) -> SegmentedTensor:
    """`places` says by offset where the chunks of the tensor lie; a tensor in one piece may be without an offset."""
    shape, dtype = tuple(value.size), dtype_name(value.properties.dtype)
    segments: list[Segment] = []
    for chunk in value.chunks:
        place = places.get(tuple(chunk.offsets), places.get(()))
        if place is None:
            raise DamagedError(f"{directory}: no file is recorded for {key!r} at {tuple(chunk.offsets)}")
        file = _inside(directory, place.relative_path)
        begin = _data_begin(file, place, numel(tuple(chunk.sizes)) * ITEMSIZE[dtype])
        segments += _rows(shape, tuple(chunk.offsets), tuple(chunk.sizes), file, begin, ITEMSIZE[dtype])
    return SegmentedTensor(shape, dtype, tuple(sorted(segments, key=lambda segment: segment.offset)))


def _inside(directory: Path, relative: str) -> Path:
    if relative.startswith("/") or ".." in Path(relative).parts:
        raise DamagedError(f"{directory}: {relative!r} leads outside")
    return directory / relative


def _data_begin(file: Path, place: Any, nbytes: int) -> int:
    """The byte of `file` at which the one tensor of the `torch.save` archive at `place` begins."""
    with file.open("rb") as handle:
        try:
            with zipfile.ZipFile(_Window(handle, place.offset, place.length)) as archive:
                records = [item for item in archive.infolist() if "/data/" in item.filename]
        except (zipfile.BadZipFile, ValueError) as error:
            raise CheckpointError(f"{file}: the tensor at byte {place.offset} is not in torch's zip format") from error
        fitting = [item for item in records if item.file_size == nbytes and item.compress_type == zipfile.ZIP_STORED]
        if len(fitting) != 1:
            raise CheckpointError(
                f"{file}: the archive at byte {place.offset} does not hold one tensor of {nbytes} bytes"
            )
        begin = int(place.offset) + fitting[0].header_offset
        handle.seek(begin + 26)
        lengths = handle.read(4)
    return begin + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class _Window(io.RawIOBase):
    """Bytes `begin` to `begin + length` of a file, as a file of their own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._begin + self._position)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data


def _rows(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], file: Path, begin: int, itemsize: int
) -> list[Segment]:
    """A box of a tensor as runs of consecutive elements."""
    if 0 in sizes:
        return []
    split = max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)
    strides = [numel(shape[dim + 1 :]) for dim in range(len(shape))]
    length = numel(sizes[split:])
    segments = []
    for index in product(*(range(size) for size in sizes[:split])):
        position = sum((offsets[dim] + at) * strides[dim] for dim, at in enumerate(index))
        position += offsets[split] * strides[split] if shape else 0
        segments.append(Segment(position, length, file, begin))
        begin += length * itemsize
    return segments
