"""Checkpoints of DeepSpeed, opened as if they were this package's, so that they load directly.

[Note: foreign checkpoints]
Their pickles are read with the restricted unpickler of `conversion`, without their tensors; a tensor's elements are
then read from the file where they lie, at any world size. The archives' CRC-32 are the only checksums that there are,
over full records: each rank verifies its share of the files when it opens the checkpoint.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .commit import holds_checkpoint
from .conversion.archive import verify_archive
from .conversion.checks import require_torch
from .conversion.sources import Source, laid_out_as_expected, open_foreign, read_text
from .coordination import run_on_all_ranks
from .errors import CheckpointError, DamagedError, MismatchError
from .latest import is_tag, read_latest
from .manifest import Manifest, TensorEntry
from .opened import Folder
from .opening import open_checkpoint
from .reader import Checkpoint, OpenReport, ReadRequest
from .restoring import restore
from .types import ITEMSIZE, Coordinator, SoloCoordinator, is_optimizer_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

logger = logging.getLogger("zero_ckpt")

T = TypeVar("T")
LATEST_UNIVERSAL = "latest_universal"
"""The file in a root of DeepSpeed that names its newest universal checkpoint."""
_MOST_TAG_BYTES = 4096


class ForeignCheckpoint(Checkpoint):
    """A tag directory of DeepSpeed, of stages 1 to 3 or universal, opened for reading. Safe for several threads.

    Names and kinds are as this package's own savers give them: every parameter has a `param` (in float32 where the
    directory holds only its float32 copy), 0-dimensional optimizer state ends in `.scalar`, and steps are floats.
    `client_state` is what `read_training_state` returns. The checksums of its files are verified by `open_any`,
    not by reads. Raises CheckpointError and DamagedError as `open_source` does.
    """

    def __init__(self, path: Path, requested: str | None) -> None:
        require_torch(f"reading {path}, a checkpoint of DeepSpeed,")
        from .conversion.training_state import read_training_state

        if (path / "offloaded_tensors").is_dir():
            raise CheckpointError(
                f"{path}: its optimizer states are in DeepSpeed's swap files, below offloaded_tensors, which are not "
                "read. Save it once more with the optimizer offloaded to the CPU"
            )
        self._source = open_foreign(path)
        self._places = dict(_places(self._source))
        self._steps = {place: step for place, key in self._places.items() if (step := _counted(self._source, key))}
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
            tag=path.name,
        )
        super().__init__(path, path.name, manifest, OpenReport(requested, path.name), Folder(path, follow=True))

    def read_into(self, name: str, kind: str, offset: int, out: Buffer, *, verify: bool = True) -> None:
        """Fill `out` with elements of a tensor from flat element `offset` on, in the dtype of its entry.

        As `Checkpoint.read_into`; `verify` has no effect. Raises NotFoundError, MismatchError and DamagedError.
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
        """Fill the buffers of many requests as `read_into` does, `threads` at a time. Raises as `read_into` does."""
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

    @property
    def fingerprint(self) -> str:
        """Text that differs when the contents do: from the files' sizes and times, as there is no manifest."""
        return self._source.fingerprint

    def cuts(self, name: str, kind: str) -> list[int]:
        """Return no elements: reads can begin anywhere."""
        return []


def open_any(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
    skip: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, or one of DeepSpeed if `tag`, `latest` or `root` itself is such a
    directory; without a file `latest` also the one that `latest_universal` names. Collective when given a coordinator.

    Of DeepSpeed's, each rank verifies the checksums of its share of the files, so that all are read once more. Raises
    as `open_checkpoint` does; DamagedError for a file of DeepSpeed that is missing or damaged, and CheckpointError for
    objects that are not read, model-parallel checkpoints, and ranks that see different directories.
    """
    group = coordinator or SoloCoordinator()
    found: list[ForeignCheckpoint] = []

    def part() -> str | None:
        """Open the directory and verify this rank's share; return its name, None if it is not DeepSpeed's."""
        directory = _foreign_directory(Path(root), tag)
        if directory is None:
            return None
        if skip and directory.name in skip:
            raise DamagedError(f"{skip[directory.name]}. Name another tag to load an older checkpoint")
        found.append(ForeignCheckpoint(directory, tag))
        if group.rank == 0:
            _warn_of_missing_states(found[0])
        files = [*directory.glob("*_states.pt"), *directory.glob("zero/**/*.pt")]
        for number, file in enumerate(sorted(files)):
            if number % group.world_size == group.rank:
                verify_archive(file)
        return directory.name

    seen = run_on_all_ranks(group, f"opening {root}" + (f" at {tag!r}" if tag is not None else ""), part)
    if len(set(seen)) > 1:
        names = ", ".join(f"rank {rank}: {name or 'none of DeepSpeed'}" for rank, name in enumerate(seen))
        raise CheckpointError(f"{root} is not the same directory on every rank; it must be shared ({names})")
    return found[0] if found else open_checkpoint(root, tag, coordinator=group, skip=skip)


def restore_any(
    root: str | os.PathLike[str],
    fill: Callable[[Checkpoint], T],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
) -> tuple[Checkpoint, T]:
    """Open a checkpoint as `open_any` does, and let `fill` read what it needs, as `restore` does with this package's
    own; collective when given a coordinator. Where bytes of DeepSpeed's are damaged it raises DamagedError and opens no
    older one. Raises as `open_any` and `restore` do."""
    return restore(root, fill, tag, coordinator=coordinator, opener=open_any)


def _warn_of_missing_states(checkpoint: Checkpoint) -> None:
    """Log how many trained parameters have no optimizer state although others have some: DeepSpeed saves none of those
    that its offloading with a ratio below 1 updates on the device."""
    with_states = {name for name, kind in checkpoint.tensors if is_optimizer_kind(kind)}
    trained = [name for name, kind in checkpoint.tensors if kind == "param" and name not in (checkpoint.frozen or ())]
    missing = [name for name in trained if name not in with_states]
    if with_states and missing:
        logger.warning(
            "%s has no optimizer state for %d of %d trained parameters (%s, for example): theirs begins anew",
            *(checkpoint.path, len(missing), len(trained), missing[0]),
        )


def is_foreign(directory: Path) -> bool:
    """Return whether a directory holds model files of DeepSpeed and is no checkpoint of this package."""
    return directory.is_dir() and not holds_checkpoint(directory) and any(directory.glob("*model_states.pt"))


def _foreign_directory(root: Path, tag: str | None) -> Path | None:
    """Return the directory of DeepSpeed that `open_any` opens; None if it opens one of this package's."""
    if tag is None and (holds_checkpoint(root) or is_foreign(root)):
        return None if holds_checkpoint(root) else root
    name = tag if tag is not None else _latest(root)
    return root / name if name is not None and is_tag(name) and is_foreign(root / name) else None


def _latest(root: Path) -> str | None:
    """Return the tag in `latest`, else in `latest_universal`; None without either, or where `latest` is damaged, which
    `open_checkpoint` reports."""
    try:
        named = read_latest(root)
    except DamagedError:
        return None
    universal = root / LATEST_UNIVERSAL
    if named is None and universal.is_file():
        return read_text(universal, _MOST_TAG_BYTES).strip()
    return named


def _places(source: Source) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield (name, kind) as this package's savers would give it, and the key in `source`, for each of its tensors."""
    for name, kind in source.tensors:
        known = kind
        if kind == "master" and (name, "param") not in source.tensors:
            known = "param"
        elif is_optimizer_kind(kind) and not source.tensors[name, kind].shape and _is_scalar(source, name, kind):
            known = f"{kind}.scalar"
        yield (name, known), (name, kind)


def _is_scalar(source: Source, name: str, kind: str) -> bool:
    """Return whether 0-dimensional state is a number of the parameter, rather than of its one element."""
    weights = [source.tensors[name, own] for own in ("param", "master") if (name, own) in source.tensors]
    return kind == "step" or not weights or bool(weights[0].shape)


def _counted(source: Source, key: tuple[str, str]) -> bytes | None:
    """Return a step that is stored as an integer as the bytes of a float32; None for any other tensor."""
    if key[1] != "step" or source.tensors[key].dtype != "I64" or source.tensors[key].shape:
        return None
    raw = bytearray(8)
    source.read_into(*key, 0, raw)
    return struct.pack("<f", *struct.unpack("<q", raw))
