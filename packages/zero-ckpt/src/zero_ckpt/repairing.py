"""Bring a root back in order: put back, sweep, restore bytes from twins, set the damaged aside, fix `latest`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from .catalog import find_candidates, load_manifest
from .checksum import checksum
from .commit import fsync_directory, read_latest, sweep, write_latest
from .errors import CheckpointError, DamagedError, NotFoundError
from .filing import read_at
from .manifest import Manifest, Slice, TensorEntry
from .safetensors_file import parse_header
from .types import ITEMSIZE
from .verifying import VerifyReport, checkpoints_in, verify

SET_ASIDE = ".damaged-"


def repair(root: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> list[str]:
    """Repair what can be repaired in `root`; returns what was done, one sentence each, empty when all was well.

    Puts back a checkpoint that a dead save had moved aside and sweeps what dead saves left; rewrites a damaged slice
    when another checkpoint of the root holds one with the same checksum; renames what stays damaged to
    `.damaged-<tag>`; and points `latest` at the newest whole checkpoint when it names none. No tensor of a whole
    checkpoint is touched.
    """
    directory = Path(root)
    if not directory.is_dir():
        raise NotFoundError(f"{directory} is not a directory")
    done = [f"swept {path.name}" if not path.exists() else f"put back {path.name}" for path in sweep(directory)]
    reports = {path: verify(path, progress=progress) for path in checkpoints_in(directory)}
    for path, report in reports.items():
        if report.ok:
            continue
        if _restore(path, [other for other in reports if other != path]):
            done.append(f"restored damaged slices of {path.name} from other checkpoints")
        again = verify(path)  # a file that it shares with another checkpoint may have been restored with that one
        if not again.ok:
            done.append(_set_aside(path, again))
    return done + _fix_latest(directory)


def _set_aside(path: Path, report: VerifyReport) -> str:
    target = path.parent / f"{SET_ASIDE}{path.name}"
    path.rename(target)
    fsync_directory(path.parent)
    return f"set {path.name} aside as {target.name}: {report.problems[0]}"


def _fix_latest(root: Path) -> list[str]:
    whole = [candidate.tag for candidate in find_candidates(root) if candidate.problem is None]
    if not whole or read_latest(root) in whole:
        return []
    write_latest(root, whole[0])
    return [f"pointed latest at {whole[0]}"]


def _restore(path: Path, others: list[Path]) -> bool:
    """Rewrite each damaged slice of `path` from a twin with the same checksum; whether any was rewritten."""
    try:
        manifest = load_manifest(path)
        twins = _twins(others)
        return sum(_restore_slice(path, manifest, tensor, piece, twins) for tensor, piece in _slices(manifest)) > 0
    except CheckpointError:
        return False  # without its manifest or headers nothing can be said about it; it is set aside


def _slices(manifest: Manifest) -> list[tuple[TensorEntry, Slice]]:
    return [(tensor, piece) for tensor in manifest.tensors for piece in tensor.slices]


_Twins = dict[tuple[str, int], list[tuple[Path, Manifest, Slice]]]


def _twins(others: list[Path]) -> _Twins:
    """Slices of other checkpoints by checksum and size; several, since files that are linked share their damage."""
    found: _Twins = {}
    for path in others:
        try:
            manifest = load_manifest(path)
        except CheckpointError:
            continue
        for tensor, piece in _slices(manifest):
            found.setdefault((piece.checksum, piece.length * ITEMSIZE[tensor.dtype]), []).append(
                (path, manifest, piece)
            )
    return found


def _restore_slice(path: Path, manifest: Manifest, tensor: TensorEntry, piece: Slice, twins: _Twins) -> bool:
    nbytes = piece.length * ITEMSIZE[tensor.dtype]
    file, begin = _place(path, manifest, piece)
    raw = bytearray(nbytes)
    read_at(file, begin, memoryview(raw), str(file))
    if checksum(raw) == piece.checksum:
        return False
    for twin in twins.get((piece.checksum, nbytes), []):
        source, source_begin = _place(*twin)
        read_at(source, source_begin, memoryview(raw), str(source))
        if checksum(raw) == piece.checksum:
            _overwrite(file, begin, raw)
            return True
    return False


def _overwrite(file: Path, begin: int, raw: bytearray) -> None:
    """Write into a file that may be read-only, as linked ones are; every link to it is restored."""
    mode = file.stat().st_mode
    file.chmod(mode | stat.S_IWUSR)
    try:
        with file.open("r+b") as target:
            target.seek(begin)
            target.write(raw)
            target.flush()
            os.fsync(target.fileno())
    finally:
        file.chmod(mode)


def _place(path: Path, manifest: Manifest, piece: Slice) -> tuple[Path, int]:
    """The file of a slice and the byte at which it begins."""
    entry = manifest.files[piece.file]
    file = path / entry.path
    if piece.begin is not None:
        return file, piece.begin
    raw = bytearray(entry.header_nbytes)
    read_at(file, 0, memoryview(raw), str(file))
    if checksum(raw) != entry.header_checksum:
        raise DamagedError(f"{file}: the header is damaged")
    entries, _ = parse_header(bytes(raw), entry.nbytes, str(file))
    if piece.key not in entries:
        raise DamagedError(f"{file}: the header does not hold slice {piece.key!r}")
    return file, entries[piece.key].begin
