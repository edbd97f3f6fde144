"""From an open generation to one that is never written again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .._engine import Engine
from .._memory import AlignedBuffer
from ..errors import FormatError
from ._container import header_for
from ._files import GenerationFiles, StoreFolders
from ._index import SealedIndex, write_index
from ._ranges import Allocator, WrittenRange

__all__ = ["check", "seal"]


def seal(
    engine: Engine,
    folders: StoreFolders,
    files: GenerationFiles,
    placement: Allocator,
    pieces: Sequence[WrittenRange],
    declared: Mapping[str, tuple[int, str]],
    reserved: int,
) -> SealedIndex:
    """Completes checksums, writes headers, syncs, and then the index: the moment at which the generation exists."""
    complete_checksums(engine, files, pieces)
    headers, keys = _headers(files, placement, pieces, declared, reserved)
    files.make_last(placement.ends, headers)
    sealed = SealedIndex(
        generation=files.generation,
        kind="safetensors" if headers else "raw",
        stripes=len(folders.paths),
        files={s: (folders.data_name(files.generation, s), placement.ends[s]) for s in files.stripes},
        pieces=sorted(pieces, key=lambda p: (p.name, p.begin)),
        keys=keys,
    )
    write_index(folders.index_path(files.generation), sealed)
    files.reopen_sealed()
    return sealed


def complete_checksums(engine: Engine, files: GenerationFiles, pieces: Sequence[WrittenRange]) -> None:
    """Reads back what has no checksum yet: writes without one, and the rests of pieces that were partly overwritten."""
    missing = [piece for piece in pieces if not piece.checksum]
    if not missing:
        return
    scratch = memoryview(AlignedBuffer(max(piece.nbytes for piece in missing)))
    for piece in missing:
        request = engine.read(files.file(piece.stripe), scratch[: piece.nbytes], piece.file_offset, checksum=True)
        request.wait()
        piece.checksum = request.checksum or ""


def check(folders: StoreFolders, sealed: SealedIndex, generation: int) -> None:
    """FormatError unless an index is of its generation, over the same paths, and its files are as long as it says."""
    index = folders.index_path(generation)
    if sealed.generation != generation:
        raise FormatError(f"'{index}' is of generation {sealed.generation}", path=index)
    if sealed.stripes != len(folders.paths):
        raise FormatError(f"'{index}' is striped over {sealed.stripes} paths, got {len(folders.paths)}", path=index)
    for stripe, (name, nbytes) in sealed.files.items():
        if stripe >= sealed.stripes or name != folders.data_name(generation, stripe):
            raise FormatError(f"'{index}' names {name!r:.200} in path {stripe}", path=index)
        path = folders.data_path(generation, stripe)
        got = os.stat(path).st_size if os.path.exists(path) else -1
        if got != nbytes:
            problem = "is missing" if got < 0 else f"has {got} bytes"
            raise FormatError(f"'{path}' {problem}, '{index}' says {nbytes}", path=path, expected=nbytes, got=got)


def _headers(
    files: GenerationFiles,
    placement: Allocator,
    pieces: Sequence[WrittenRange],
    declared: Mapping[str, tuple[int, str]],
    reserved: int,
) -> tuple[dict[int, bytes], dict[tuple[str, int], str]]:
    """Headers by stripe, or none at all when a name was not declared or the space kept free does not suffice."""
    if reserved == 0 or any(piece.name not in declared for piece in pieces):
        return {}, {}
    headers, keys = {}, {}
    for stripe in files.stripes:
        own = [piece for piece in pieces if piece.stripe == stripe]
        made = header_for(own, declared, reserved, placement.ends[stripe])
        if made is None:
            return {}, {}
        headers[stripe] = made[0]
        keys.update(made[1])
    return headers, keys
