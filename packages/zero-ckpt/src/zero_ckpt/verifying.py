"""Read every byte of a checkpoint and say what is damaged, by tensor and file."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .catalog import examine
from .checksum import Checksummer, checksum
from .commit import replaced_directories, replaced_tag
from .errors import DamagedError
from .filing import read_at
from .manifest import FileEntry, Manifest, Slice, TensorEntry
from .safetensors_file import Entry, parse_header
from .scanning import scan
from .types import ITEMSIZE

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Problem:
    """One damage: `tensor` is `name (kind)`, or empty when it concerns the whole file or the checkpoint."""

    file: Path
    tensor: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor + ': ' if self.tensor else ''}{self.message}"


@dataclass
class VerifyReport:
    """What was read and what is damaged."""

    path: Path
    nbytes: int = 0
    absent: list[str] = field(default_factory=list)
    """Files of other nodes that are not in this directory, when each node has its own."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was saved."""
        return not self.problems


def verify(
    path: str | os.PathLike[str], *, threads: int = 4, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Read every file of a checkpoint directory once and compare every checksum.

    `progress` is called with the number of bytes read since the last call. Never raises for damage: all of it is in the
    report.
    """
    directory = Path(path)
    report = VerifyReport(directory)
    candidate = examine(directory.name, directory)
    if candidate.manifest is None:
        report.problems.append(Problem(directory, "", candidate.problem or "no manifest"))
        return report
    manifest = candidate.manifest
    contents = _contents(manifest)
    with ThreadPoolExecutor(threads, thread_name_prefix="zero-ckpt-verify") as pool:
        jobs = []
        for index, entry in enumerate(manifest.files):
            file = directory / entry.path
            if manifest.per_node and not file.exists():
                report.absent.append(entry.path)
                continue
            report.nbytes += entry.nbytes
            check = _verify_file if entry.extents is None else _verify_raw
            jobs.append(pool.submit(check, file, entry, contents[index], progress or _ignore))
        for job in jobs:
            report.problems += job.result()
    return report


def checkpoints_in(root: Path) -> list[Path]:
    """Everything in `root` that is meant to be a checkpoint, whole or not, by tag."""
    found = {replaced_tag(path): path for path in replaced_directories(root)}
    found.update({path.name: path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")})
    return [found[tag] for tag in sorted(found)]


def _ignore(nbytes: int) -> None:
    """No progress is shown."""


def _contents(manifest: Manifest) -> list[list[tuple[TensorEntry, Slice]]]:
    contents: list[list[tuple[TensorEntry, Slice]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        for piece in tensor.slices:
            contents[piece.file].append((tensor, piece))
    return contents


def _verify_file(
    path: Path, entry: FileEntry, contents: list[tuple[TensorEntry, Slice]], progress: Callable[[int], None]
) -> list[Problem]:
    total = Checksummer()
    try:
        raw = _read(path, 0, entry.header_nbytes)
        total.update(raw)
        progress(len(raw))
        if checksum(raw) != entry.header_checksum:
            return [Problem(path, "", "the header is damaged (its checksum does not hold)")]
        stored, _ = parse_header(bytes(raw), entry.nbytes, str(path))
        problems = _verify_slices(path, entry, contents, stored, total, progress)
    except DamagedError as error:
        return [Problem(path, "", str(error))]
    if not problems and total.result() != entry.checksum:
        problems.append(Problem(path, "", "the file is damaged outside of its tensors (its checksum does not hold)"))
    return problems


def _verify_raw(
    path: Path, entry: FileEntry, contents: list[tuple[TensorEntry, Slice]], progress: Callable[[int], None]
) -> list[Problem]:
    """Walk the extents of a linked file; those that are no slice lie between the tensors."""
    slices = {piece.begin: (tensor, piece) for tensor, piece in contents}
    problems: list[Problem] = []
    for begin, (nbytes, expected) in entry.begins().items():
        try:
            found = scan(path, begin, nbytes, str(path), progress)
        except DamagedError as error:
            return [*problems, Problem(path, "", str(error))]
        if found == expected:
            continue
        if begin in slices:
            tensor, piece = slices[begin]
            problems.append(_damaged(path, f"{tensor.name} ({tensor.kind})", piece, found))
        else:
            message = f"bytes {begin} to {begin + nbytes}, outside of its tensors, are damaged"
            problems.append(Problem(path, "", message))
    return problems


def _damaged(path: Path, name: str, piece: Slice, found: str) -> Problem:
    message = f"elements {piece.offset} to {piece.offset + piece.length} are damaged"
    return Problem(path, name, f"{message} (checksum {found}, expected {piece.checksum})")


def _verify_slices(
    path: Path,
    entry: FileEntry,
    contents: list[tuple[TensorEntry, Slice]],
    stored: dict[str, Entry],
    total: Checksummer,
    progress: Callable[[int], None],
) -> list[Problem]:
    """Walk the file front to back, feeding `total`, and compare each slice on the way."""
    problems, placed = [], []
    for tensor, piece in contents:
        name = f"{tensor.name} ({tensor.kind})"
        place = stored.get(piece.key)
        if place is None or place.end - place.begin != piece.length * ITEMSIZE[tensor.dtype]:
            problems.append(Problem(path, name, f"the file's header does not hold slice {piece.key!r}"))
        else:
            placed.append((place, name, piece))
    position = entry.header_nbytes
    for place, name, piece in sorted(placed, key=lambda item: item[0].begin):
        if place.begin < position:
            problems.append(Problem(path, name, f"slice {piece.key!r} overlaps another"))
            continue
        _feed(path, position, place.begin, total, progress)
        raw = _read(path, place.begin, place.end - place.begin)
        total.update(raw)
        progress(len(raw))
        if (found := checksum(raw)) != piece.checksum:
            problems.append(_damaged(path, name, piece, found))
        position = place.end
    _feed(path, position, entry.nbytes, total, progress)
    return problems


def _feed(path: Path, begin: int, end: int, total: Checksummer, progress: Callable[[int], None]) -> None:
    for position in range(begin, end, _CHUNK_BYTES):
        raw = _read(path, position, min(_CHUNK_BYTES, end - position))
        total.update(raw)
        progress(len(raw))


def _read(path: Path, begin: int, nbytes: int) -> bytearray:
    raw = bytearray(nbytes)
    read_at(path, begin, memoryview(raw), str(path))
    return raw
