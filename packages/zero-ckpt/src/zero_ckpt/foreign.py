"""Checkpoints of DeepSpeed, opened as if they were this package's, so that they load directly.

[Note: foreign checkpoints]
Their pickles are read with the restricted unpickler of `conversion`, without their tensors; a tensor's elements are
then read from the file where they lie, at any world size. The archives' CRC-32 are the only checksums that there are,
over full records: each rank verifies its share of the files when it opens the checkpoint (`open_any`).
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from .checksum import checksum
from .conversion.checks import require_torch
from .conversion.segments import SegmentSource
from .conversion.sources import Source, laid_out_as_expected, open_foreign
from .errors import CheckpointError, MismatchError
from .manifest import Manifest, TensorEntry
from .opened import Folder
from .reader import Checkpoint, OpenReport, ReadRequest
from .types import ITEMSIZE, is_optimizer_kind

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("zero_ckpt")


class ForeignCheckpoint(Checkpoint):
    """A tag directory of DeepSpeed, of stages 1 to 3 or universal, opened for reading. Safe for several threads.

    `path` is the tag directory, and `report` says how it was chosen. Names and kinds are as this package's own savers
    give them: every parameter has a `param` (in float32 where the directory holds only its float32 copy), 0-dimensional
    optimizer state ends in `.scalar`, and steps are floats. `client_state` is what `read_training_state` returns. The
    checksums of its files are verified by `open_any`, not by reads, which go through the opened directory. Raises
    CheckpointError and DamagedError as `open_source` does, CheckpointError for a symbolic link among its files, and
    ReplacedError, as reads do, when a save has put another directory in its place.
    """

    def __init__(self, path: Path, report: OpenReport) -> None:
        require_torch(f"reading {path}, a checkpoint of DeepSpeed,")
        from .conversion.training_state import read_training_state

        folder = Folder(path, follow=True)
        with folder.unreplaced():
            _refuse_links(path)
            if (path / "offloaded_tensors").is_dir():
                raise CheckpointError(
                    f"{path}: its optimizer states are in DeepSpeed's swap files, below offloaded_tensors, which are "
                    "not read. Save it once more with the optimizer offloaded to the CPU"
                )
            self._source = _open_segments(folder)
            self._places = dict(_own_names(self._source))
            self._steps = {
                place: step for place, key in self._places.items() if (step := _integer_step(self._source, key))
            }
            with laid_out_as_expected(path):
                training, ranks = read_training_state(path)
        found = {place: self._source.tensors[key] for place, key in self._places.items()}
        tensors = tuple(
            TensorEntry(*place, tuple(tensor.shape), "F32" if place in self._steps else tensor.dtype, ())
            for place, tensor in found.items()
        )
        frozen = self._source.frozen
        manifest = Manifest(
            step=self._source.step,
            world_size=ranks,
            files=(),
            tensors=tensors,
            aliases=self._source.aliases,
            client_state=training,
            frozen=None if frozen is None else frozenset(frozen),
            tag=report.opened,
        )
        super().__init__(path, report.opened, manifest, report, folder)

    def read_into(self, name: str, kind: str, offset: int, out: Buffer, *, verify: bool = True) -> None:
        """Fill `out` with elements of tensor (`name`, `kind`) from flat element `offset` on, in the dtype of its entry.

        As `Checkpoint.read_into`, except that `verify` has no effect. Raises NotFoundError, MismatchError and
        DamagedError.
        """
        entry = self.entry(name, kind)
        view = memoryview(out)
        if view.readonly or not view.c_contiguous or view.nbytes % ITEMSIZE[entry.dtype]:
            raise MismatchError(f"{name!r} ({kind}): the buffer must be writable, contiguous and of full elements")
        if not view.nbytes:
            return
        place = (entry.name, entry.kind)
        if place in self._steps:
            view.cast("B")[:] = self._steps[place]
        else:
            self._source.read_into(*self._places[place], offset, view)

    def read_many(self, requests: Iterable[ReadRequest], *, verify: bool = True, threads: int = 4) -> None:
        """Fill the buffers of many requests as `read_into` does, `threads` at a time, with its errors; `verify` has no
        effect."""
        with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="zero-ckpt-read") as pool:
            futures = [
                pool.submit(self.read_into, request.name, request.kind, request.offset, request.out)
                for request in requests
            ]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def unreplaced(self) -> AbstractContextManager[None]:
        """Return a context manager that raises ReplacedError at its end if another directory has taken the place of
        this one."""
        return self._folder.unreplaced()

    def summary(self) -> list[int | str]:
        """Return [step, number of ranks that wrote the checkpoint, checksum of the names, kinds, shapes and dtypes of
        all tensors], to compare what several ranks have opened."""
        entries = [(entry.name, entry.kind, entry.shape, entry.dtype) for entry in self.tensors.values()]
        return [self.step, self.manifest.world_size, checksum(repr(entries).encode())]

    @property
    def fingerprint(self) -> str:
        """Text that differs when the contents do: made from the files' sizes and modification times, as there is no
        manifest."""
        return self._source.fingerprint

    def cuts(self, name: str, kind: str) -> list[int]:
        """Return an empty list, as reads of a tensor are equally fast from any element; see `Source.cuts`."""
        return []


def warn_of_missing_states(checkpoint: Checkpoint) -> None:
    """Log how many trained parameters of a checkpoint of DeepSpeed have no optimizer state, if others have some.
    DeepSpeed does not save the states that it updates on the device when it offloads with a ratio below 1."""
    with_states = {name for name, kind in checkpoint.tensors if is_optimizer_kind(kind)}
    trained = [name for name, kind in checkpoint.tensors if kind == "param" and name not in (checkpoint.frozen or ())]
    missing = [name for name in trained if name not in with_states]
    if with_states and missing:
        logger.warning(
            "%s has no optimizer state for %d of %d trained parameters (%s, for example): theirs begins anew",
            *(checkpoint.path, len(missing), len(trained), missing[0]),
        )


def _refuse_links(directory: Path) -> None:
    """Raise CheckpointError for a symbolic link among the files of a tag directory: it may lead out of it."""
    files = [*directory.glob("*_states.pt"), directory / "zero"]
    for folder, folders, names in os.walk(directory / "zero"):
        files += [Path(folder, name) for name in (*folders, *names)]
    for file in files:
        if file.is_symlink():
            raise CheckpointError(
                f"{file} is a symbolic link, which is not followed in a checkpoint; copy the folder with its files "
                "(cp -rL)"
            )


def _open_segments(folder: Folder) -> SegmentSource:
    """Open the directory `folder` of DeepSpeed and return its tensors as a source, whose reads go through `folder`.
    Raises DamagedError for a missing or damaged file, and CheckpointError for one that is not read."""
    source = open_foreign(folder.path)
    if not isinstance(source, SegmentSource):
        raise CheckpointError(f"{folder.path} is no checkpoint of DeepSpeed")
    return source.held_by(folder)


def _own_names(source: Source) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield two (name, kind) pairs for each tensor of `source`: the one that this package's savers would give it, and
    the one that it has in `source`."""
    for name, kind in source.tensors:
        known = kind
        if kind == "master" and (name, "param") not in source.tensors:
            known = "param"
        elif is_optimizer_kind(kind) and not source.tensors[name, kind].shape and _is_scalar(source, name, kind):
            known = f"{kind}.scalar"
        yield (name, known), (name, kind)


def _is_scalar(source: Source, name: str, kind: str) -> bool:
    """Return whether the 0-dimensional optimizer state `kind` of parameter `name` is a number for the whole parameter.
    Otherwise the parameter is 0-dimensional itself and this is the state of its one element."""
    weights = [source.tensors[name, own] for own in ("param", "master") if (name, own) in source.tensors]
    return kind == "step" or not weights or bool(weights[0].shape)


def _integer_step(source: Source, key: tuple[str, str]) -> bytes | None:
    """Return a step count that `source` stores as an integer as the 4 bytes of a float32; None if the tensor `key`,
    (name, kind), is not such a step count."""
    if key[1] != "step" or source.tensors[key].dtype != "I64" or source.tensors[key].shape:
        return None
    raw = bytearray(8)
    source.read_into(*key, 0, raw)
    return struct.pack("<f", *struct.unpack("<q", raw))
