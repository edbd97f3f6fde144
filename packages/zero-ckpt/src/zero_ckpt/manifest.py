"""Manifest version 1: what a checkpoint directory contains, in one checksummed msgpack file.

Data files are safetensors files, and raw files: sealed files that were linked into the directory, without a header, as
a row of extents. A slice is a run of a tensor's elements in one file, with a checksum. Everything read is checked
before it is believed, and no size in a manifest leads to an allocation that the files do not back. `at` is the place in
the manifest's map that an error names, such as `tensors[3].slices[0]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import xxhash

from .checksum import checksum, is_checksum
from .errors import CheckpointError, DamagedError
from .plain import pack, unpack
from .types import ITEMSIZE, is_kind, numel

MANIFEST_NAME = "manifest.msgpack"
MAGIC = b"ZCKPT\x00\x00\x01"
VERSION = 1
MAX_MANIFEST_BYTES = 512 << 20
"""No larger manifest is written or read."""
_PREFIX_BYTES = 16
_ALWAYS_READABLE_BYTES = 4 << 20
_MAX_INT = 1 << 62


@dataclass(frozen=True)
class FileEntry:
    """One data file: `path` relative to the checkpoint directory, its size, and checksums of it and of its header.

    `extents` are None for a safetensors file. A raw file has no header: its extents, (bytes, checksum) each, follow one
    another and cover it, and its `checksum` is that of their checksums (see `raw_checksum`).
    """

    path: str
    nbytes: int
    checksum: str
    header_nbytes: int
    header_checksum: str
    extents: tuple[tuple[int, str], ...] | None = None

    def extents_by_begin(self) -> dict[int, tuple[int, str]]:
        """Return the extents of a raw file as (bytes, checksum) by the position of their first byte; empty for a
        safetensors file."""
        found, position = {}, 0
        for nbytes, digest in self.extents or ():
            found[position] = (nbytes, digest)
            position += nbytes
        return found

    def encode(self) -> dict[str, Any]:
        """Return the entry as plain data: a dict of its fields, without `extents` where that is None."""
        table = {key: value for key, value in vars(self).items() if key != "extents"}
        return table if self.extents is None else {**table, "extents": [list(extent) for extent in self.extents]}


@dataclass(frozen=True)
class Slice:
    """Elements `offset` to `offset + length` of a flattened tensor, in file number `file` of the manifest. In a
    safetensors file they are the entry `key` (`begin` is None), in a raw file the extent that begins at byte `begin`.
    """

    file: int
    key: str
    offset: int
    length: int
    checksum: str
    begin: int | None = None

    def encode(self) -> dict[str, Any]:
        """Return the slice as plain data: a dict of its fields, without `begin` where that is None."""
        table = {key: value for key, value in vars(self).items() if key != "begin"}
        return table if self.begin is None else {**table, "begin": self.begin}


def raw_checksum(extents: Iterable[tuple[int, str]]) -> str:
    """Return the checksum of a raw file with these extents, (bytes, checksum) each: the checksum of the extents'
    checksums, joined to one text."""
    return checksum("".join(digest for _, digest in extents).encode())


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: its slices are sorted by offset and cover it exactly once."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its tensors' bytes."""

    step: int
    world_size: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    client_state: Any = None
    config: Any = None
    rank_state: tuple[Any, ...] = ()
    per_node: bool = False
    """True where nodes had file systems of their own, so that files of other nodes may be absent here."""
    frozen: frozenset[str] | None = None
    """Parameters that were not trained; None where the saver did not say."""
    tag: str | None = None
    """The tag it was saved as; None in checkpoints of earlier versions."""

    def encode(self) -> bytes:
        """Return the contents of the manifest file. Raises CheckpointError for a value that is not plain data, or a
        manifest too large to be read again."""
        body = pack(
            {
                "format": "zero-ckpt",
                "version": VERSION,
                "step": self.step,
                "world_size": self.world_size,
                "files": [entry.encode() for entry in self.files],
                "tensors": [
                    {
                        "name": tensor.name,
                        "kind": tensor.kind,
                        "shape": list(tensor.shape),
                        "dtype": tensor.dtype,
                        "slices": [piece.encode() for piece in tensor.slices],
                    }
                    for tensor in self.tensors
                ],
                "aliases": dict(self.aliases),
                "client_state": self.client_state,
                "config": self.config,
                "rank_state": list(self.rank_state),
                **({"per_node": True} if self.per_node else {}),
                **({"frozen": sorted(self.frozen)} if self.frozen is not None else {}),
                **({"tag": self.tag} if self.tag is not None else {}),
            }
        )
        _require_readable(body)
        return MAGIC + xxhash.xxh3_64_digest(body) + body


def _require_readable(body: bytes) -> None:
    """Raise CheckpointError if `decode_manifest` would refuse `body`, the packed map of a manifest, for its size or the
    memory that decoding takes."""
    if len(body) <= _ALWAYS_READABLE_BYTES:
        return
    try:
        if len(body) > MAX_MANIFEST_BYTES - _PREFIX_BYTES:
            raise DamagedError(f"{len(body)} bytes, expected at most {MAX_MANIFEST_BYTES - _PREFIX_BYTES}")
        unpack(body)
    except DamagedError as error:
        raise CheckpointError(
            f"the manifest would not be readable: {error}; keep large data out of client_state, config and rank_state, "
            "or save it as tensors"
        ) from error


def decode_manifest(raw: bytes, where: str) -> Manifest:
    """Return the manifest whose file's contents are `raw`; `where` names the file in errors. Raises DamagedError when
    anything about it violates the format, and CheckpointError when a later version wrote it."""
    body = memoryview(raw)[_PREFIX_BYTES:]
    if raw[:7] != MAGIC[:7]:
        raise DamagedError(f"{where}: not a checkpoint manifest (wrong magic)")
    if raw[:8] != MAGIC:
        raise CheckpointError(f"{where}: manifest version {raw[7:8].hex()} is not known here; upgrade zero-ckpt")
    if xxhash.xxh3_64_digest(body) != raw[8:_PREFIX_BYTES]:
        raise DamagedError(f"{where}: the manifest's checksum does not hold")
    try:
        return _Decoder(where).manifest(unpack(body))
    except DamagedError as error:
        raise DamagedError(f"{where}: {error}") from error


class _Decoder:
    """Turns the decoded msgpack map of a manifest file into dataclasses, checking every value. `where` names the file
    in errors.

    Each DamagedError also names `at`, the place of the value in the map.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def manifest(self, value: Any) -> Manifest:
        """Return the manifest in the map `value`. Raises DamagedError, or CheckpointError for an unknown version."""
        table = _typed(value, dict, "the manifest")
        if table.get("format") != "zero-ckpt":
            raise DamagedError(f"format is {table.get('format')!r}, expected 'zero-ckpt'")
        if table.get("version") != VERSION:
            raise CheckpointError(
                f"{self._where}: manifest version {table.get('version')!r} is not known here; upgrade zero-ckpt"
            )
        files = tuple(self._file(item, f"files[{i}]") for i, item in enumerate(_get(table, "files", list)))
        _require_unique((entry.path for entry in files), "files: the path")
        tensors = tuple(
            self._tensor(item, f"tensors[{i}]", len(files)) for i, item in enumerate(_get(table, "tensors", list))
        )
        _require_raw_slices(files, tensors)
        _require_distinct_keys(files, tensors)
        _require_unique(((tensor.name, tensor.kind) for tensor in tensors), "tensors: the (name, kind)")
        self._require_room(files, tensors)
        aliases = _get(table, "aliases", dict)
        for alias, name in aliases.items():
            _typed(name, str, f"aliases[{alias!r}]")
        return Manifest(
            step=_size(table, "step"),
            world_size=_size(table, "world_size"),
            files=files,
            tensors=tensors,
            aliases=aliases,
            client_state=table.get("client_state"),
            config=table.get("config"),
            rank_state=tuple(_typed(table.get("rank_state", []), list, "rank_state")),
            per_node=_typed(table.get("per_node", False), bool, "per_node"),
            frozen=_string_set(table["frozen"], "frozen") if "frozen" in table else None,
            tag=_get(table, "tag", str) if "tag" in table else None,
        )

    def _file(self, value: Any, at: str) -> FileEntry:
        """Return the file entry in `value`, the item at `at` of the map. Raises DamagedError when it is not valid."""
        table = _typed(value, dict, at)
        entry = FileEntry(
            path=_safe_path(_get(table, "path", str, at), at),
            nbytes=_size(table, "nbytes", at),
            checksum=_checksum(table, "checksum", at),
            header_nbytes=_size(table, "header_nbytes", at),
            header_checksum=_checksum(table, "header_checksum", at),
            extents=self._extents(table["extents"], f"{at}.extents") if "extents" in table else None,
        )
        if entry.extents is not None:
            _require_raw_entry(entry, at)
        return entry

    def _extents(self, value: Any, at: str) -> tuple[tuple[int, str], ...]:
        """Return (bytes, checksum) of every extent in the list `value`, the item at `at` of the map. Raises
        DamagedError when one is not valid."""
        found = []
        for index, item in enumerate(_typed(value, list, at)):
            pair = _typed(item, list, f"{at}[{index}]")
            if len(pair) != 2 or type(pair[0]) is not int or not 0 < pair[0] < _MAX_INT or not is_checksum(pair[1]):
                raise DamagedError(f"{at}[{index}]: {pair!r} is not a number of bytes and a checksum")
            found.append((pair[0], str(pair[1])))
        return tuple(found)

    def _tensor(self, value: Any, at: str, file_count: int) -> TensorEntry:
        """Return the tensor in `value`, the item at `at` of a manifest of `file_count` files. Raises DamagedError when
        it is not valid."""
        table = _typed(value, dict, at)
        name, kind = _get(table, "name", str, at), _get(table, "kind", str, at)
        at = f"{at} ({name!r}, {kind!r})"
        if not is_kind(kind):
            raise DamagedError(f"{at}: {kind!r} is not a kind")
        shape = _get(table, "shape", list, at)
        if len(shape) > 64 or not all(type(size) is int and 0 <= size < _MAX_INT for size in shape):
            raise DamagedError(f"{at}: shape {shape!r} is not a list of sizes")
        dtype = _get(table, "dtype", str, at)
        if dtype not in ITEMSIZE:
            raise DamagedError(f"{at}: unknown dtype {dtype!r}")
        slices = tuple(
            self._slice(item, f"{at}.slices[{i}]", file_count) for i, item in enumerate(_get(table, "slices", list, at))
        )
        return TensorEntry(name, kind, tuple(shape), dtype, _require_coverage(slices, numel(tuple(shape)), at))

    def _slice(self, value: Any, at: str, file_count: int) -> Slice:
        """Return the slice in `value`, the item at `at` of a manifest of `file_count` files. Raises DamagedError when
        it is not valid."""
        table = _typed(value, dict, at)
        piece = Slice(
            file=_size(table, "file", at),
            key=_get(table, "key", str, at),
            offset=_size(table, "offset", at),
            length=_size(table, "length", at),
            checksum=_checksum(table, "checksum", at),
            begin=_size(table, "begin", at) if "begin" in table else None,
        )
        if piece.file >= file_count or piece.length == 0:
            raise DamagedError(f"{at}: file {piece.file} of {file_count}, length {piece.length}")
        return piece

    def _require_room(self, files: tuple[FileEntry, ...], tensors: tuple[TensorEntry, ...]) -> None:
        """Raise DamagedError when the header and the slices of a file together take more bytes than the file has."""
        claimed = [entry.header_nbytes for entry in files]
        for tensor in tensors:
            for piece in tensor.slices:
                claimed[piece.file] += piece.length * ITEMSIZE[tensor.dtype]
        for entry, nbytes in zip(files, claimed, strict=True):
            if nbytes > entry.nbytes:
                raise DamagedError(f"{entry.path}: slices need {nbytes} bytes of a file of {entry.nbytes}")


def _require_raw_entry(entry: FileEntry, at: str) -> None:
    """Raise DamagedError, naming the place `at`, unless a raw file has no header, its extents cover it, and their
    checksums give its own."""
    covered = sum(nbytes for nbytes, _ in entry.extents or ())
    if entry.header_nbytes or covered != entry.nbytes or entry.checksum != raw_checksum(entry.extents or ()):
        raise DamagedError(
            f"{at}: a raw file has no header and extents that cover it; got a header of {entry.header_nbytes} bytes "
            f"and {covered} bytes of extents for a file of {entry.nbytes}"
        )


def _require_raw_slices(files: tuple[FileEntry, ...], tensors: tuple[TensorEntry, ...]) -> None:
    """Raise DamagedError unless every slice in a raw file, and every slice with a `begin`, is an extent of a raw file,
    and no two are the same extent."""
    extents_by_begin = [None if entry.extents is None else entry.extents_by_begin() for entry in files]
    for tensor in tensors:
        for piece in tensor.slices:
            extents = extents_by_begin[piece.file]
            if extents is None and piece.begin is None:
                continue
            found = None if extents is None or piece.begin is None else extents.pop(piece.begin, None)
            if found != (piece.length * ITEMSIZE[tensor.dtype], piece.checksum):
                raise DamagedError(
                    f"{tensor.name!r} ({tensor.kind}): elements {piece.offset} to {piece.offset + piece.length} are no "
                    f"extent of {files[piece.file].path} at byte {piece.begin}"
                )


def _require_distinct_keys(files: tuple[FileEntry, ...], tensors: tuple[TensorEntry, ...]) -> None:
    """Raise DamagedError when two slices refer to the same entry of a safetensors file."""
    seen: set[tuple[int, str]] = set()
    for tensor in tensors:
        for piece in tensor.slices:
            if piece.begin is None and (piece.file, piece.key) in seen:
                raise DamagedError(
                    f"{tensor.name!r} ({tensor.kind}): entry {piece.key!r} of {files[piece.file].path} is given to "
                    "two slices"
                )
            seen.add((piece.file, piece.key))


def _require_coverage(slices: tuple[Slice, ...], count: int, at: str) -> tuple[Slice, ...]:
    """Return the slices of a tensor of `count` elements sorted by offset. Raises DamagedError, naming the place `at`,
    unless they cover all elements exactly once."""
    ordered = tuple(sorted(slices, key=lambda piece: piece.offset))
    position = 0
    for piece in ordered:
        if piece.offset != position:
            problem = "overlap" if piece.offset < position else "leave a hole"
            raise DamagedError(f"{at}: slices {problem} at element {min(position, piece.offset)}")
        position += piece.length
    if position != count:
        raise DamagedError(f"{at}: slices cover {position} of {count} elements")
    return ordered


def _safe_path(path: str, at: str) -> str:
    """Return `path`. Raises DamagedError when it is empty, or could on any system lead out of the checkpoint
    directory."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path or ":" in parts[0]:
        raise DamagedError(f"{at}: {path!r} is not a path inside the checkpoint directory")
    return path


def _string_set(value: Any, at: str) -> frozenset[str]:
    """Return a list of strings as a set. Raises DamagedError, naming the place `at`, for anything else."""
    return frozenset(_typed(item, str, f"{at}[{index}]") for index, item in enumerate(_typed(value, list, at)))


def _typed(value: Any, kind: type, at: str) -> Any:
    """Return `value`. Raises DamagedError, naming the place `at`, when its type is not exactly `kind`."""
    if type(value) is not kind:
        raise DamagedError(f"{at}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _get(table: dict[str, Any], key: str, kind: type, at: str = "the manifest") -> Any:
    """Return the value that `table` has under `key`. Raises DamagedError, naming the place `at`, when it is missing or
    not of type `kind`."""
    return _typed(table.get(key), kind, f"{at}.{key}")


def _size(table: dict[str, Any], key: str, at: str = "the manifest") -> int:
    """Return the size or count that `table` has under `key`. Raises DamagedError, naming the place `at`, unless it is
    an integer from 0 to 2**62 - 1."""
    value: int = _get(table, key, int, at)
    if not 0 <= value < _MAX_INT:
        raise DamagedError(f"{at}.{key}: {value} is out of range")
    return value


def _checksum(table: dict[str, Any], key: str, at: str) -> str:
    """Return the checksum string that `table` has under `key`. Raises DamagedError, naming the place `at`, unless it is
    well-formed."""
    value = table.get(key)
    if not is_checksum(value):
        raise DamagedError(f"{at}.{key}: {value!r} is not a checksum")
    return str(value)


def _require_unique(items: Iterable[Any], what: str) -> None:
    """Raise DamagedError when an item appears twice; `what` names the items."""
    seen = set()
    for item in items:
        if item in seen:
            raise DamagedError(f"{what} {item!r} appears twice")
        seen.add(item)
