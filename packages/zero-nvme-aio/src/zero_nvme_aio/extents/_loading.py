"""Loads the sealed generations (files that are never written again) that a store's folders hold when it is opened."""

from __future__ import annotations

from collections.abc import Sequence

from .._engine import Engine
from ..errors import FormatError
from . import _sealing
from ._files import GenerationFiles, StoreFolders
from ._index import read_index
from ._ranges import Covered, overlay

__all__ = ["load_sealed"]


def load_sealed(
    folders: StoreFolders, engines: Sequence[Engine], live: dict[str, list[Covered]]
) -> tuple[dict[int, GenerationFiles], dict[tuple[int, str, int], str]]:
    """Open the sealed generations in the folders and put their current ranges into `live`, by name. Return the open
    files, by generation, and the safetensors entry of each range, by (generation, name, offset). `engines`: one for
    each path.

    FormatError if an index is damaged, was written with another number of paths, or names a file that is missing or has
    another length. Of a generation of which nothing is current, as after a crash or a drive's absence while it was
    removed, the index is removed instead.
    """
    found = [(number, read_index(folders.index_path(number))) for number in folders.indexes()]
    for _, sealed in found:
        for piece in sealed.pieces:
            live[piece.name] = overlay(live.get(piece.name, []), piece, open_generation=-1)
    current = {c.piece.generation for covered in live.values() for c in covered}
    generations, keys = {}, {}
    for number, sealed in sorted(found, key=lambda entry: entry[0] not in current):  # first those that may be refused
        files = GenerationFiles(engines, folders, number)
        try:
            _sealing.check_files(folders, sealed, number)
        except FormatError:
            if number in current or sealed.generation != number:
                raise
            files.remove()
            continue
        files.open_sealed(sorted(sealed.files))
        generations[number] = files
        for piece in sealed.pieces:
            keys[number, piece.name, piece.begin] = sealed.keys[piece.name, piece.begin]
    return generations, keys
