"""Safetensors files, one or the shards of a model, as a source of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checksum import Checksummer
from ..errors import DamagedError, MismatchError
from ..filing import read_at
from ..safetensors_file import parse_header, read_header
from ..types import ITEMSIZE

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class _FileTensor:
    """One tensor: its shape, dtype, file, first byte there, and the byte behind its last."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    begin: int
    end: int


class SafetensorsSource:
    """A `Source` of the safetensors `files`, in which every entry is a `param`; only their headers are read before
    `read_into`.

    Metadata `{alias: name}`, as safetensors writes for shared tensors, gives the aliases. Raises DamagedError for a
    file that is not valid, or a tensor that is in two files.
    """

    step = 0
    client_state: Any = None
    frozen: frozenset[str] | None = None

    def __init__(self, files: Sequence[Path]) -> None:
        self._tensors: dict[tuple[str, str], _FileTensor] = {}
        self._aliases: dict[str, str] = {}
        total = Checksummer()
        shared: dict[str, str] = {}
        for file in files:
            raw, nbytes = read_header(file)
            entries, metadata = parse_header(raw, nbytes, str(file))
            total.update(raw)
            for name, entry in entries.items():
                if (name, "param") in self._tensors:
                    raise DamagedError(f"{file}: tensor {name!r} is in another file too")
                self._tensors[name, "param"] = _FileTensor(entry.shape, entry.dtype, file, entry.begin, entry.end)
            shared.update(metadata)
            stat = file.stat()
            total.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
        self._aliases = {alias: name for alias, name in shared.items() if (name, "param") in self._tensors}
        self.fingerprint = total.result()

    @property
    def tensors(self) -> Mapping[tuple[str, str], _FileTensor]:
        """Every tensor by (name, `param`)."""
        return self._tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        """Shared tensors that were left out when the file was written, each with the name that is stored."""
        return self._aliases

    def cuts(self, name: str, kind: str) -> Sequence[int]:
        """Return an empty list, as reads of a tensor are equally fast from any element; see `Source.cuts`."""
        return ()

    def read_into(self, name: str, kind: str, offset: int, out: Buffer) -> None:
        """Fill `out` with elements of tensor `name` from flat element `offset` on. Raises MismatchError if the tensor
        ends before `out` is full, and DamagedError if the file does."""
        place = self._tensors[name, kind]
        view = memoryview(out).cast("B")
        begin = place.begin + offset * ITEMSIZE[place.dtype]
        if begin + view.nbytes > place.end:
            raise MismatchError(f"{name!r}: {view.nbytes} bytes from element {offset} on are not in it")
        read_at(place.file, begin, view, f"{name!r} in {place.file}")
