"""Torch distributed checkpoints (DCP) as a source.

Their `.metadata` is a pickle. It is read with an unpickler that knows only the few classes of which such metadata is
made; tensors are then read in place from the `.distcp` files.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, DamagedError
from ..torch.buffers import dtype_name
from ..types import ITEMSIZE, numel
from .segments import Segment, SegmentedTensor, SegmentSource

_ALLOWED = {
    "builtins": {"dict", "list", "set", "tuple", "slice"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "device", "dtype", "strided", "contiguous_format", "preserve_format"},
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


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP metadata, and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")


def open_dcp(directory: Path) -> SegmentSource:
    """Open a torch distributed checkpoint directory.

    A key such as `model.layer.weight` is the parameter `layer.weight` when all tensors of the checkpoint that are not
    the optimizer's share that first part; `optimizer.state.<name>.<kind>` becomes the parameter's state.
    """
    path = directory / ".metadata"
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        sizes = dict(metadata.state_dict_metadata)
        storage = dict(metadata.storage_data)
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError) as error:
        raise DamagedError(f"{path}: {error}") from error
    found = {key: value for key, value in sizes.items() if hasattr(value, "chunks")}
    names = _names(list(found))
    tensors = {names[key]: _tensor(directory, key, value, storage) for key, value in found.items()}
    return SegmentSource(tensors, {}, 0, None)


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


def _tensor(directory: Path, key: str, value: Any, storage: dict[Any, Any]) -> SegmentedTensor:
    shape, dtype = tuple(value.size), dtype_name(value.properties.dtype)
    segments: list[Segment] = []
    for chunk in value.chunks:
        own = [(tuple(index.offset or ()), info) for index, info in storage.items() if index.fqn == key]
        places = [info for offset, info in own if offset == tuple(chunk.offsets) or len(own) == 1]
        if not places:
            raise DamagedError(f"{directory}: no file is recorded for {key!r} at {tuple(chunk.offsets)}")
        file = _inside(directory, places[0].relative_path)
        begin = _data_begin(file, places[0], numel(tuple(chunk.sizes)) * ITEMSIZE[dtype])
        segments += _rows(shape, tuple(chunk.offsets), tuple(chunk.sizes), file, begin, ITEMSIZE[dtype])
    return SegmentedTensor(shape, dtype, tuple(sorted(segments, key=lambda segment: segment.offset)))


def _inside(directory: Path, relative: str) -> Path:
    if relative.startswith("/") or ".." in Path(relative).parts:
        raise DamagedError(f"{directory}: {relative!r} leads outside")
    return directory / relative


def _data_begin(file: Path, place: Any, nbytes: int) -> int:
    """The byte of `file` at which the one tensor of the `torch.save` archive at `place` begins."""
    with file.open("rb") as handle:
        handle.seek(place.offset)
        raw = handle.read(place.length)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            records = [item for item in archive.infolist() if "/data/" in item.filename and item.file_size == nbytes]
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(f"{file}: the tensor at byte {place.offset} is not in torch's zip format") from error
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{file}: the archive at byte {place.offset} does not hold one tensor of {nbytes} bytes")
    at = records[0].header_offset
    name_length, extra_length = (int.from_bytes(raw[at + skip : at + skip + 2], "little") for skip in (26, 28))
    return int(place.offset) + at + 30 + name_length + extra_length


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
