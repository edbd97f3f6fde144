"""Read every byte of a checkpoint and report the damage, by tensor and file.

A slice is a run of a tensor's elements in one data file, with a checksum. A data file is a safetensors file or, linked
into the checkpoint, a raw file, which is a row of extents, each with a checksum. A root is a directory of checkpoints,
each in a folder that is named by its tag.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .catalog import examine
from .checksum import Checksummer
from .commit import checkpoint_directories, exists, replaced_directories, replaced_tag, tag_of
from .errors import CheckpointError
from .headers import read_raw_header
from .manifest import FileEntry, Manifest, Slice, TensorEntry
from .opened import Folder
from .safetensors_file import HeaderEntry, parse_header
from .scanning import scan_fd
from .types import ITEMSIZE

_ATTEMPTS = 10
_BETWEEN_ATTEMPTS_SECONDS = 0.01


@dataclass(frozen=True)
class Damage:
    """One damage, in `file` or, where it concerns the whole checkpoint, in that directory.

    `tensor` is `name (kind)`, or empty when it concerns the whole file or the checkpoint.
    """

    file: Path
    tensor: str
    message: str

    def __str__(self) -> str:
        """Return the damage as one line: where it is and what it is."""
        return f"{self.file}: {self.tensor + ': ' if self.tensor else ''}{self.message}"


@dataclass
class VerifyReport:
    """The result of `verify`: `nbytes` is the size of the files that are there, `problems` the damage."""

    path: Path
    nbytes: int = 0
    absent: list[str] = field(default_factory=list)
    """Files of other nodes that are not in this directory, when each node has its own."""
    problems: list[Damage] = field(default_factory=list)
    saved_as: str | None = None
    """The tag it was saved as, where the directory has another name now."""
    moved: bool = False
    """The directory was moved, replaced or removed whenever it was read, so that `problems` say nothing."""

    @property
    def ok(self) -> bool:
        """Return whether no damage was found."""
        return not self.problems


def verify(
    path: str | os.PathLike[str], *, threads: int = 4, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Read every file of the checkpoint directory `path` once, compare every checksum, and return the damage found.

    `threads` files are read at a time. `progress` is called, on those threads, with the number of bytes read since the
    last call. Nothing on disk makes it raise, be it damaged, missing or hostile: all of that is in the report. A
    directory that was renamed is not damaged; the report's `saved_as` has its tag.
    """
    return verify_candidate(Path(path), in_root=False, threads=threads, progress=progress)


def verify_candidate(
    directory: Path, *, in_root: bool = True, threads: int = 4, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Verify one checkpoint directory as `verify` does. `in_root`: it lies in a root, where its name must be the tag
    that it was saved under.

    While a save is replacing the directory, verification is repeated, up to ten times.
    """
    for _ in range(_ATTEMPTS):
        report = _verify(directory, in_root, threads, progress or _ignore)
        if not report.moved:
            break
        time.sleep(_BETWEEN_ATTEMPTS_SECONDS)
    return report


def _verify(directory: Path, in_root: bool, threads: int, progress: Callable[[int], None]) -> VerifyReport:
    """Verify a directory once, whether or not it is replaced meanwhile, and return the report; the arguments are those
    of `verify_candidate`."""
    report = VerifyReport(directory)
    candidate = examine(tag_of(directory), directory, in_root=in_root)
    manifest, folder = candidate.manifest, candidate.folder
    if manifest is None or folder is None:
        report.problems.append(Damage(directory, "", candidate.problem or "no manifest"))
        report.moved = candidate.moved
        return report
    if not in_root and manifest.tag not in (None, tag_of(directory.resolve())):
        report.saved_as = manifest.tag
    contents = _slices_by_file(manifest)
    with ThreadPoolExecutor(threads, thread_name_prefix="zero-ckpt-verify") as pool:
        jobs = []
        for entry, own in zip(manifest.files, contents, strict=True):
            if manifest.per_node and not exists(directory / entry.path):
                report.absent.append(entry.path)
                continue
            report.nbytes += entry.nbytes
            jobs.append(pool.submit(_verify_data_file, folder, entry, own, progress))
        for job in jobs:
            report.problems += job.result()
    report.moved = bool(report.problems) and not folder.is_current()
    return report


def checkpoints_in(root: Path) -> list[Path]:
    """Return every directory in `root` into which a checkpoint was written, whole or not, sorted by tag.

    A checkpoint that a save moved aside is included unless another has its tag. Raises OSError when `root` cannot be
    listed.
    """
    found = {replaced_tag(path): path for path in replaced_directories(root)}
    found.update({path.name: path for path in checkpoint_directories(root)})
    return [found[tag] for tag in sorted(found)]


def _ignore(nbytes: int) -> None:
    """Do nothing: a `progress` function, called with bytes read, that shows none."""


def _slices_by_file(manifest: Manifest) -> list[list[tuple[TensorEntry, Slice]]]:
    """Return, for each file of the manifest in its order, the slices in the file, as pairs (tensor, slice)."""
    contents: list[list[tuple[TensorEntry, Slice]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        for piece in tensor.slices:
            contents[piece.file].append((tensor, piece))
    return contents


def _verify_data_file(
    folder: Folder, entry: FileEntry, contents: list[tuple[TensorEntry, Slice]], progress: Callable[[int], None]
) -> list[Damage]:
    """Verify one data file of a checkpoint and return its damage, an empty list if there is none.

    `contents` are the slices that the manifest places in the file, as pairs (tensor, slice). `progress` is called with
    the number of bytes read. Damage does not raise.
    """
    path = folder.path / entry.path
    check = _verify_safetensors if entry.extents is None else _verify_raw
    try:
        fd = folder.open_named(entry.path, str(path))
        try:
            return check(_OpenDataFile(folder, entry, fd, progress), contents)
        finally:
            os.close(fd)
    except (CheckpointError, OSError) as error:
        return [Damage(path, "", str(error).removeprefix(f"{path}: "))]


@dataclass(frozen=True)
class _OpenDataFile:
    """A data file that is being verified, open as `fd`; `progress` is called with the number of bytes of each read."""

    folder: Folder
    entry: FileEntry
    fd: int
    progress: Callable[[int], None]

    @property
    def path(self) -> Path:
        """The path of the file, for messages."""
        return self.folder.path / self.entry.path

    def scan(self, begin: int, nbytes: int, whole: Checksummer | None = None) -> str:
        """Return the checksum of `nbytes` bytes of the file from byte `begin` on. `whole`: a further checksum that is
        updated with the same bytes. Raises DamagedError when they cannot be read."""
        return scan_fd(self.fd, begin, nbytes, str(self.path), self.progress, whole)


def _verify_safetensors(file: _OpenDataFile, contents: list[tuple[TensorEntry, Slice]]) -> list[Damage]:
    """Compare the header, the slices and the whole of a safetensors file with their checksums, and return the damage.
    Raises DamagedError for a header that is not valid or a read that fails.

    `contents` are the slices that the manifest places in the file, as pairs (tensor, slice).
    """
    total = Checksummer()
    raw = read_raw_header(file.folder, file.entry)
    total.update(raw)
    file.progress(len(raw))
    stored, _ = parse_header(raw, file.entry.nbytes, str(file.path))
    problems = _verify_slices(file, contents, stored, total)
    if not problems and total.result() != file.entry.checksum:
        message = "the file is damaged outside of its tensors (its checksum does not hold)"
        problems.append(Damage(file.path, "", message))
    return problems


def _verify_raw(file: _OpenDataFile, contents: list[tuple[TensorEntry, Slice]]) -> list[Damage]:
    """Compare every extent of a raw file with its checksum, and return the damage. Extents between the tensors are
    compared too. Raises DamagedError for a read that fails.

    `contents` are the slices that the manifest places in the file, as pairs (tensor, slice).
    """
    slices = {piece.begin: (tensor, piece) for tensor, piece in contents}
    problems: list[Damage] = []
    for begin, (nbytes, expected) in file.entry.extents_by_begin().items():
        found = file.scan(begin, nbytes)
        if found == expected:
            continue
        if begin in slices:
            tensor, piece = slices[begin]
            problems.append(_slice_damage(file.path, f"{tensor.name} ({tensor.kind})", piece, found))
        else:
            message = f"bytes {begin} to {begin + nbytes}, outside of its tensors, are damaged"
            problems.append(Damage(file.path, "", message))
    return problems


def _slice_damage(path: Path, name: str, piece: Slice, found: str) -> Damage:
    """Return a `Damage` that says that the slice `piece` of the tensor `name` has the checksum `found` instead of its
    own; `path` is its file."""
    message = f"elements {piece.offset} to {piece.offset + piece.length} are damaged"
    return Damage(path, name, f"{message} (checksum {found}, expected {piece.checksum})")


def _verify_slices(
    file: _OpenDataFile, contents: list[tuple[TensorEntry, Slice]], stored: dict[str, HeaderEntry], total: Checksummer
) -> list[Damage]:
    """Read a safetensors file from the end of its header to its own end, and return the damage of slices that differ or
    are not in the header.

    `contents` are the slices in it, as pairs (tensor, slice), and `stored` are the header's entries by key; `total` is
    updated with every byte read. Raises DamagedError for a read that fails.
    """
    problems, placed = [], []
    for tensor, piece in contents:
        name = f"{tensor.name} ({tensor.kind})"
        place = stored.get(piece.key)
        if place is None or place.end - place.begin != piece.length * ITEMSIZE[tensor.dtype]:
            problems.append(Damage(file.path, name, f"the file's header does not hold slice {piece.key!r}"))
        else:
            placed.append((place, name, piece))
    position = file.entry.header_nbytes
    for place, name, piece in sorted(placed, key=lambda item: item[0].begin):
        file.scan(position, place.begin - position, total)
        found = file.scan(place.begin, place.end - place.begin, total)
        if found != piece.checksum:
            problems.append(_slice_damage(file.path, name, piece, found))
        position = place.end
    file.scan(position, file.entry.nbytes - position, total)
    return problems
