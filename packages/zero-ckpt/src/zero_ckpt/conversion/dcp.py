"""Torch distributed checkpoints (DCP) as a source.

Their `.metadata` is a pickle. It is read with an unpickler that knows only the few classes of which such metadata is
made; tensors are then read in place from the `.distcp` files.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
import zipfile
from collections import OrderedDict
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, ClassVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ..errors import CheckpointError, DamagedError
from ..opened import read_bounded
from ..torch.buffers import dtype_name
from ..types import ITEMSIZE, numel
from .archive import directory_nbytes
from .segments import Segment, SegmentedTensor, SegmentSource

_MAX_METADATA_BYTES = 256 << 20
_MAX_DIRECTORY_BYTES = 1 << 20
_MAX_SEGMENTS = 1 << 22
_REFUSED_OPCODES = frozenset(
    opcode[0]
    for opcode in (
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.PERSID, pickle.BINPERSID),
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ, pickle.ADDITEMS, pickle.FROZENSET),
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
    """Unpickles the classes of DCP metadata, and dtypes, and refuses everything else.

    It is the standard library's unpickler in Python: the one in C allocates the memory that an opcode declares (a byte
    array of a terabyte, memo entry 2**31) before it has seen the bytes.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _REFUSED_OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the allowlist. Raises UnpicklingError for any other."""
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")

    def load_build(self) -> None:
        """Handle the opcode BUILD: set the state of the object on the stack. Raises UnpicklingError for the state of a
        class or a function, which belongs to the process and not to the file."""
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError(f"{self.stack[-2]!r} is not allowed to get a state in checkpoint metadata")
        super().load_build()  # type: ignore[misc]

    def load_reduce(self) -> None:
        """Handle the opcode REDUCE: call the allowed class on the stack. Raises UnpicklingError for a mapping or set
        that is made with arguments, as it must be filled item by item, where its keys are checked."""
        if self.stack[-2] in (dict, set, OrderedDict) and self.stack[-1]:
            raise pickle.UnpicklingError(f"{self.stack[-2].__name__}(…) is not allowed in checkpoint metadata")
        super().load_reduce()  # type: ignore[misc]

    def load_setitem(self) -> None:
        """Handle the opcode SETITEM: set an item of a mapping. Raises UnpicklingError for a key that is not allowed
        (see `_require_key`)."""
        _require_key(self.stack[-2])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        """Handle the opcode SETITEMS: set items of a mapping. Raises UnpicklingError, before any is set, for a key that
        is not allowed (see `_require_key`)."""
        for key in self.stack[::2]:  # what came since the mark; `pop_mark` has not been called yet
            _require_key(key)
        super().load_setitems()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def _require_key(key: Any) -> None:
    """Raise UnpicklingError unless `key` is a string, an integer or a `MetadataIndex`, as metadata has them: hashing
    nested tuples may take forever.
    """
    if type(key) in (str, int):
        return
    if isinstance(key, MetadataIndex):
        offset = key.offset
        plain = isinstance(key.fqn, str) and isinstance(key.index, (int, NoneType))
        if plain and (offset is None or (isinstance(offset, tuple) and all(type(size) is int for size in offset))):
            return
    raise pickle.UnpicklingError(f"a key of type {type(key).__name__} is not allowed in checkpoint metadata")


def open_dcp(directory: Path) -> SegmentSource:
    """Open a torch distributed checkpoint directory.

    A key such as `model.layer.weight` is the parameter `layer.weight` when all tensors of the checkpoint that are not
    the optimizer's share that first part, and it is `model`, `module`, `app` or `state_dict`;
    `optimizer.state.<name>.<kind>` becomes the parameter's state. Entries that are no tensors are left out. Raises
    DamagedError, and CheckpointError for what torch could write but is not read here.
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
    names = _names_and_kinds(list(found))
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for key, offset, info in stored:
        places.setdefault(key, {})[offset] = info
    tensors, left = {}, _MAX_SEGMENTS
    for key, value in found.items():
        tensors[names[key]] = _segmented_tensor(directory, key, value, places.get(key, {}), left)
        left -= len(tensors[names[key]].segments)
    return SegmentSource(tensors, {}, 0, None)


def _read_metadata(path: Path) -> bytes:
    """Return the bytes of a metadata file. Raises DamagedError, also for more than 256 MiB."""
    fd = _open(path)
    try:
        return read_bounded(fd, _MAX_METADATA_BYTES, str(path))
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    """Open a regular file, which may be reached by a link, and return its descriptor, for the caller to close. Raises
    DamagedError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedError(f"{path}: not a regular file")
    return fd


def _names_and_kinds(keys: list[str]) -> dict[str, tuple[str, str]]:
    """Return, for each of `keys`, the checkpoint's own names of tensors, the (name, kind) of the tensor, as `open_dcp`
    describes it."""
    optimizer = [key for key in keys if ".state." in key and key.startswith(("optim.", "optimizer."))]
    model = [key for key in keys if key not in optimizer]
    firsts = {key.split(".", 1)[0] for key in model}
    strip = len(firsts) == 1 and firsts <= {"model", "module", "app", "state_dict"} and all("." in key for key in model)
    names = {key: (key.split(".", 1)[1] if strip else key, "param") for key in model}
    for key in optimizer:
        name, _, kind = key.split(".state.", 1)[1].rpartition(".")
        names[key] = (name, kind)
    return names


def _segmented_tensor(
    directory: Path, key: str, value: Any, places: dict[tuple[int, ...], Any], most: int
) -> SegmentedTensor:
    """Return the tensor that the checkpoint in `directory` stores under `key`. `value` is the metadata of the key;
    `places` has the storage info of the tensor's chunks by their offsets.

    A tensor in one chunk may be stored without an offset. Raises DamagedError, before memory is allocated, when there
    would be more than `most` segments, and for metadata or files that are not valid.
    """
    shape, dtype = _sizes(value.size), dtype_name(value.properties.dtype)
    boxes = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in value.chunks]
    segments: list[Segment] = []
    runs = sum(_count_runs(shape, sizes) for _, sizes in boxes)
    if runs > most:
        raise DamagedError(f"{directory}: {key!r} would be {runs} runs of elements, expected at most {most}")
    for offsets, sizes in boxes:
        place = places.get(offsets, places.get(()))
        if place is None:
            raise DamagedError(f"{directory}: no file is recorded for {key!r} at {offsets}")
        file = _path_inside(directory, place.relative_path)
        begin = _data_begin(file, place, numel(sizes) * ITEMSIZE[dtype])
        segments += _segments_of_box(shape, offsets, sizes, file, begin, ITEMSIZE[dtype])
    return SegmentedTensor(shape, dtype, tuple(sorted(segments, key=lambda segment: segment.offset)))


def _path_inside(directory: Path, relative: str) -> Path:
    """Return the path of the file `relative` in `directory`. Raises DamagedError when it leads outside."""
    if relative.startswith("/") or ".." in Path(relative).parts:
        raise DamagedError(f"{directory}: {relative!r} leads outside")
    return directory / relative


def _data_begin(file: Path, place: Any, nbytes: int) -> int:
    """Return the byte of `file` at which a tensor's data begins. The tensor, of `nbytes` bytes, is the only one in a
    `torch.save` archive, and `place` has the archive's `offset` and `length` in the file.

    Raises CheckpointError for an archive that is not read, and DamagedError for what is not inside the file.
    """
    with open(_open(file), "rb") as handle:
        total = os.fstat(handle.fileno()).st_size
        if not 0 <= place.offset <= place.offset + place.length <= total:
            raise DamagedError(f"{file}: {place.length} bytes from byte {place.offset} on are not in its {total}")
        directory = directory_nbytes(handle.fileno(), str(file), place.offset, place.length)
        if directory > _MAX_DIRECTORY_BYTES:
            raise DamagedError(f"{file}: the zip directory at byte {place.offset} would have {directory} bytes")
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
    begin += 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    if begin + nbytes > total:
        raise DamagedError(f"{file}: the tensor at byte {begin} reaches beyond the end of the file")
    return begin


class _Window(io.RawIOBase):
    """Bytes `begin` to `begin + length` of `file`, as a read-only file object of their own. Reading moves the position
    of `file`."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self._position = 0

    def seekable(self) -> bool:
        """Return True: `seek` works."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position, in bytes from the window's begin."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position as `io.IOBase.seek` does, not before the window's begin, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes from the position on, which moves behind them; None or a negative number: all up to
        the window's end."""
        left = max(0, self._length - self._position)
        self._file.seek(self._begin + self._position)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data


def _sizes(value: Any) -> tuple[int, ...]:
    """Return `value`, a shape or offsets, as a tuple. Raises DamagedError unless it is at most 64 integers from 0 to
    2**62 - 1."""
    found = tuple(value)
    if len(found) > 64 or not all(type(size) is int and 0 <= size < 1 << 62 for size in found):
        raise DamagedError(f"a shape or an offset of type {type(value).__name__} holds what is no size")
    return found


def _split_dimension(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the last dimension in which a box of shape `sizes` covers only a part of a tensor of shape `shape`; 0 if
    there is none.

    Raises DamagedError when the numbers of dimensions differ.
    """
    if len(sizes) != len(shape):
        raise DamagedError(f"a part of shape {sizes} is no part of a tensor of shape {shape}")
    return max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)


def _count_runs(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the number of runs of consecutive elements in a box of shape `sizes` of a tensor of shape `shape`."""
    return 0 if 0 in sizes else numel(sizes[: _split_dimension(shape, sizes)])


def _segments_of_box(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], file: Path, begin: int, itemsize: int
) -> list[Segment]:
    """Return the segments of a box of a tensor: its runs of consecutive elements, in order.

    The box has shape `sizes` and begins at `offsets` of the tensor of shape `shape`; its data, in C order, begin at
    byte `begin` of `file`.
    """
    if 0 in sizes:
        return []
    split = _split_dimension(shape, sizes)
    strides = [numel(shape[dim + 1 :]) for dim in range(len(shape))]
    length = numel(sizes[split:])
    segments = []
    for index in product(*(range(size) for size in sizes[:split])):
        position = sum((offsets[dim] + at) * strides[dim] for dim, at in enumerate(index))
        position += offsets[split] * strides[split] if shape else 0
        segments.append(Segment(position, length, file, begin))
        begin += length * itemsize
    return segments
