"""A source whose tensors are put together from byte ranges of files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checksum import checksum
from ..errors import DamagedError, MismatchError
from ..filing import read_at
from ..opened import Folder
from ..types import ITEMSIZE, numel

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class Segment:
    """`length` elements of a flattened tensor from `offset` on, at byte `begin` of a file, or given as `data`."""

    offset: int
    length: int
    file: Path = Path()
    begin: int = 0
    data: bytes | None = None


@dataclass(frozen=True)
class SegmentedTensor:
    """A tensor whose segments are sorted and cover it."""

    shape: tuple[int, ...]
    dtype: str
    segments: tuple[Segment, ...]

    def checked(self, name: str) -> SegmentedTensor:
        """Return the tensor itself if its segments cover it exactly once; otherwise raise DamagedError, in which it is
        called `name`."""
        position = 0
        for segment in self.segments:
            if segment.offset != position:
                raise DamagedError(f"{name!r}: element {position} is missing or doubled")
            position += segment.length
        if position != numel(self.shape):
            raise DamagedError(
                f"{name!r}: {position} elements were found, shape {self.shape} needs {numel(self.shape)}"
            )
        return self


class SegmentSource:
    """A `Source` whose `tensors`, by (name, kind), are read with plain file reads: no file is ever loaded as a whole.

    `aliases`, `step`, `client_state` and `frozen` are what these properties of a `Source` return. `folder` is the
    opened directory through which files are read, None to open them by path. Raises DamagedError when the segments of a
    tensor do not cover it exactly once.
    """

    def __init__(
        self,
        tensors: Mapping[tuple[str, str], SegmentedTensor],
        aliases: Mapping[str, str],
        step: int,
        client_state: Any,
        frozen: Collection[str] | None = None,
        folder: Folder | None = None,
    ) -> None:
        self.tensors = {key: tensor.checked(f"{key[0]} ({key[1]})") for key, tensor in tensors.items()}
        self.aliases, self.step, self.client_state, self.frozen = aliases, step, client_state, frozen
        self._folder = folder

    def held_by(self, folder: Folder) -> SegmentSource:
        """Return a source of the same tensors that reads through `folder`, an opened directory in which all of its
        files lie."""
        return SegmentSource(self.tensors, self.aliases, self.step, self.client_state, self.frozen, folder)

    @property
    def fingerprint(self) -> str:
        """A checksum of the segments' positions and of their files' sizes and modification times."""
        files = {
            segment.file for tensor in self.tensors.values() for segment in tensor.segments if segment.data is None
        }
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
        return checksum(repr((stats, sorted(self.tensors.items(), key=lambda item: item[0]))).encode())

    def cuts(self, name: str, kind: str) -> Sequence[int]:
        """Return an empty list, as reads of a tensor are equally fast from any element; see `Source.cuts`."""
        return ()

    def read_into(self, name: str, kind: str, offset: int, out: Buffer) -> None:
        """Fill `out` with a tensor's elements from flat element `offset` on. Raises MismatchError when the tensor has
        fewer, DamagedError, and ReplacedError when the folder was replaced and its files are gone."""
        tensor = self.tensors[name, kind]
        size = ITEMSIZE[tensor.dtype]
        view = memoryview(out).cast("B")
        end = offset + view.nbytes // size
        if end > numel(tensor.shape):
            raise MismatchError(f"{name!r} ({kind}): elements {offset} to {end} of {numel(tensor.shape)}")
        first = max(bisect_right(tensor.segments, offset, key=lambda segment: segment.offset) - 1, 0)
        for segment in islice(tensor.segments, first, None):
            low, high = max(offset, segment.offset), min(end, segment.offset + segment.length)
            if low >= high:
                break
            target = view[(low - offset) * size : (high - offset) * size]
            skip = (low - segment.offset) * size
            if segment.data is not None:
                target[:] = segment.data[skip : skip + target.nbytes]
                continue
            where = f"{name!r} ({kind}) in {segment.file}"
            if self._folder is None:
                read_at(segment.file, segment.begin + skip, target, where)
            else:
                relative = str(segment.file.relative_to(self._folder.path))
                self._folder.read_at(relative, segment.begin + skip, target, where)
