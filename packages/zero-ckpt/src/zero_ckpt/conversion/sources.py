"""Sources of a conversion: one small Protocol, and how a path is recognised."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..commit import holds_checkpoint, list_tags
from ..errors import CheckpointError, DamagedError, NotFoundError
from ..latest import is_tag, read_latest
from ..locating import open_spec, split_spec
from ..opened import read_bounded
from ..relative import start_of
from .checks import require_torch

if TYPE_CHECKING:
    from typing_extensions import Buffer


PIECE_BYTES = 8 << 20
_MAX_INDEX_BYTES = 64 << 20
Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


class SourceTensor(Protocol):
    """Shape and dtype of a tensor that has not been read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype by its safetensors name, such as `BF16`."""
        ...


class Source(Protocol):
    """Tensors by (name, kind), in the order of the output, that can be read piece by piece; kinds are those of
    `Interval`, dtypes have their safetensors names. A `zero_ckpt.Checkpoint` is one.
    """

    @property
    def tensors(self) -> Mapping[tuple[str, str], SourceTensor]:
        """The tensors by (name, kind), in the order of the output."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names, each with the name in `tensors`."""
        ...

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        ...

    @property
    def client_state(self) -> Any:
        """The user's plain data, None without any."""
        ...

    @property
    def frozen(self) -> Collection[str] | None:
        """Parameters that are not trained; None where that is not known."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that differs when the contents differ; interrupted conversions are continued only from an equal one."""
        ...

    def cuts(self, name: str, kind: str) -> Sequence[int]:
        """Return the elements, beside 0, at which reads of a tensor should begin to be cheap; may be empty."""
        ...

    def read_into(self, name: str, kind: str, offset: int, out: Buffer) -> None:
        """Fill `out` with a tensor's elements from flat element `offset` on, in the stored dtype. Raises
        CheckpointError."""
        ...


def pieces(source: Source, name: str, kind: str, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (first element, number of elements) of reads of at most `PIECE_BYTES` that together cover a tensor, in
    order.

    The tensor (`name`, `kind`) has `count` elements of `itemsize` bytes; no read crosses one of the source's `cuts`.
    """
    step = PIECE_BYTES // itemsize
    for begin, end in pairwise(sorted({0, count, *source.cuts(name, kind)})):
        for offset in range(begin, end, step):
            yield offset, min(step, end - offset)


def open_source(spec: str | os.PathLike[str]) -> Source:
    """Open the checkpoint that `spec` names, whatever its format.

    It recognises a root or checkpoint directory of this package, a safetensors file or a directory of them, a DeepSpeed
    checkpoint (stages 0 to 3, or universal), and a torch distributed checkpoint. After `@` stands a tag or, for this
    package's, a step. No tensor is read. Raises NotFoundError when there is nothing, DamagedError when it is one of
    these and not valid, CheckpointError when it is none of these.
    """
    path, which = split_spec(os.fspath(spec))
    if path.is_file():
        from .safetensors_source import SafetensorsSource

        return SafetensorsSource([path])
    if not path.is_dir():
        raise NotFoundError(f"{path} does not exist{start_of(path)}")
    if holds_checkpoint(path) or list_tags(path):
        return open_spec(os.fspath(spec))
    return open_foreign(_tag_directory(path, which))


def open_foreign(folder: Path) -> Source:
    """Open a checkpoint directory that is not of this package, recognised by the names of its files. Raises as
    `open_source` does."""
    with laid_out_as_expected(folder):
        return _open_by_file_names(folder)


@contextmanager
def laid_out_as_expected(folder: Path) -> Iterator[None]:
    """Raise DamagedError, naming `folder`, if the `with` statement meets a missing key or a value of another type while
    it reads another library's checkpoint."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise DamagedError(
            f"{folder} is not laid out as a checkpoint of DeepSpeed or torch is: {type(error).__name__}: {error}"
        ) from error


def _tag_directory(path: Path, which: str | None) -> Path:
    """Return the directory in the DeepSpeed root `path` of the tag `which`; if that is None, of the tag that `latest`,
    else `latest_universal`, names. If neither names one, return `path` itself.

    Raises NotFoundError when there is no directory `which`, and DamagedError for a `latest` that cannot be read.
    """
    tags: Sequence[str | None] = (which,) if which else (read_latest(path), _small_text(path / "latest_universal"))
    for tag in tags:
        if tag and is_tag(tag) and (path / tag).is_dir():
            return path / tag
    if which:
        raise NotFoundError(f"{path} has no checkpoint {which!r}")
    return path


def _small_text(path: Path) -> str | None:
    """Return the stripped text of the file `path`; None if there is none. Raises DamagedError for a file of more than
    4096 bytes."""
    return read_text(path, 4096).strip() if path.is_file() else None


def read_text(path: Path, limit: int) -> str:
    """Return the text of a small file. Raises DamagedError when it cannot be read, is larger than `limit` bytes or not
    UTF-8."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
    try:
        return read_bounded(fd, limit, str(path)).decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path}: {error}") from error
    finally:
        os.close(fd)


def _open_by_file_names(path: Path) -> Source:
    """Open a checkpoint directory that is not of this package, recognised by the names of its files.

    Raises CheckpointError for an unknown format, or when it needs torch, which is not installed.
    """
    if list(path.glob("*model_states.pt")) or (path / ".metadata").is_file():
        require_torch(f"reading {path}, a checkpoint of DeepSpeed or torch,")
    if (path / "zero").is_dir() and list(path.glob("*model_states.pt")):
        from .universal import open_universal

        return open_universal(path)
    if list(path.glob("*model_states.pt")):
        from .deepspeed import open_deepspeed

        return open_deepspeed(path)
    if (path / ".metadata").is_file():
        from .dcp import open_dcp

        return open_dcp(path)
    index = path / "model.safetensors.index.json"
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        files = _files_in_index(index)
    if files:
        from .safetensors_source import SafetensorsSource

        return SafetensorsSource(files)
    raise CheckpointError(
        f"{path} is not a checkpoint that is known here: expected a zero-ckpt root, *.safetensors, DeepSpeed's "
        "*model_states.pt, or the .metadata of a torch distributed checkpoint"
    )


def _files_in_index(index: Path) -> list[Path]:
    """Return the files that `index`, a `model.safetensors.index.json`, names, as sorted paths beside it; whether they
    exist is not checked. Raises DamagedError when the index is not valid or names files in other directories."""
    try:
        names = sorted(set(json.loads(read_text(index, _MAX_INDEX_BYTES))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{index} holds no weight_map of file names: {error!r}") from error
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DamagedError(f"{index} names files that are not beside it")
    return [index.parent / name for name in names]
