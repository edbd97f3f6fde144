"""The narrow waist: what one rank contributes to a checkpoint, and how ranks talk. Imports nothing of this package."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

ITEMSIZE: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of every dtype a checkpoint can hold, by its safetensors name."""

MODEL_KINDS = frozenset({"param", "buffer", "master"})
"""Kinds of tensors that belong to a model."""
STATE_KIND = "state"
"""The kind of tensors inside the state dicts of stateful objects, and of bare tensors."""
_KIND = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


@dataclass(frozen=True)
class FileExtent:
    """Bytes that lie in a file already: `nbytes` from byte `file_offset_bytes` of `path` on.

    The file is sealed: its content never changes again, and it exists until the save has returned. `checksum` is
    `"xxh3_64:<16 hex>"` of exactly these bytes and is trusted; None: it is computed by reading them, a few MiB at a
    time. `owner` is any object that must stay alive for the file to exist (a sealed generation of an extent store,
    say): a background save keeps it until it is done.
    """

    path: str | os.PathLike[str]
    file_offset_bytes: int
    nbytes: int
    checksum: str | None = None
    owner: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Interval:
    """A run of consecutive elements of one logical tensor, flattened in C order.

    `name` is the parameter or buffer name, `kind` is `param`, `buffer`, `master` or an optimizer state key, `shape` the
    shape of the whole tensor, `dtype` a key of `ITEMSIZE`, `offset` the first element. `data` is a C-contiguous buffer
    of the interval's raw bytes (any element format), or a function that returns one; a function is called once, on the
    saving thread, shortly before its bytes are written, and its buffer must stay valid until the next such call, so a
    staging buffer may be reused. `length` in elements is needed with a function only. A `FileExtent` as `data` is taken
    into the checkpoint by a hard link to its file, without passing through memory; where the checkpoint is on another
    file system it is copied.

    `version` tells a background save that nobody writes the memory before `AsyncSaver.copied` returns, so that it may
    be copied in the background, and `data` be called on another thread. It returns a value that changes when the memory
    is written: the save fails if that happens meanwhile. None: the memory may change as soon as `AsyncSaver.save`
    returns.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    data: Buffer | Callable[[], Buffer] | FileExtent
    length: int | None = None
    version: Callable[[], object] | None = None


class Coordinator(Protocol):
    """The collectives of one job's ranks, for an implementation to provide; every rank makes the same calls in the same
    order."""

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the `obj` of every rank, in rank order, on every rank; `obj` is plain data (see `zero_ckpt.plain`)."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...


class SoloCoordinator:
    """A `Coordinator` for a job of one process: no call communicates or waits."""

    rank = 0
    world_size = 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return `[obj]`, as there is one rank."""
        return [obj]

    def barrier(self) -> None:
        """Return at once."""


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of this shape; 1 for a 0-dimensional one."""
    count = 1
    for size in shape:
        count *= size
    return count


def is_kind(text: str) -> bool:
    """Return whether `text` can be a kind: 1 to 100 of A-Z a-z 0-9 _ . -, so that it is safe in a file name."""
    return _KIND.fullmatch(text) is not None


def is_optimizer_kind(kind: str) -> bool:
    """Return whether tensors of this kind are optimizer state: any kind but `param`, `buffer`, `master` and `state`."""
    return kind not in MODEL_KINDS and kind != STATE_KIND


def state_kind(key: str) -> str:
    """Return the kind under which optimizer state with this `key` of the state dict is stored: the key, with `.state`
    behind one that would be another kind, such as `buffer`."""
    return key if is_optimizer_kind(key) else f"{key}.state"


def state_key(kind: str) -> str:
    """Return the key in the optimizer's state dict of state stored under `kind`: the kind without the `.state` that
    `state_kind` adds, and without `.scalar`, under which 0-dimensional state may be stored."""
    stem = kind.removesuffix(".scalar")
    key = stem.removesuffix(".state")
    return stem if is_optimizer_kind(key) else key


def byte_view(data: Buffer) -> memoryview:
    """Return `data` as a flat view of bytes, without a copy; an empty buffer gives an empty read-only view.

    The view is as writable as `data`. Raises TypeError when `data` is not a C-contiguous buffer.
    """
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
