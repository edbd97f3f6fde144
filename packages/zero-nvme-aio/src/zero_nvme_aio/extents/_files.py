"""The files of one generation: created, sealed, opened again, removed. A generation is what a store writes between two
seals; a stripe is the number of a path, from 0.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence

from .._engine import Engine
from .._file import File
from ..errors import ExtentError
from ._reflink import shares_blocks

__all__ = ["GenerationFiles", "StoreFolders"]


class StoreFolders:
    """Names of a store's files: `<prefix>.g<generation>.s<stripe>.extents` in each of `paths`, the index beside stripe
    0.
    """

    def __init__(self, paths: Sequence[str], prefix: str) -> None:
        self.paths = paths
        self.prefix = prefix
        self._sharing: dict[int, bool] = {}

    def take(self) -> int:
        """Make the folders and lock the store; return the file descriptor that holds the lock, for `give_back`. Two
        stores exclude each other if they have the same prefix and the same first path. ExtentError while another one,
        here or in another process, holds it; OSError for a folder or lock file that cannot be made, opened or locked.
        """
        for path in self.paths:
            os.makedirs(path, exist_ok=True)
        lock = os.path.join(self.paths[0], f"{self.prefix}.lock")
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ExtentError(f"the store '{self.prefix}' in '{self.paths[0]}' is in use") from None
        except OSError as error:
            os.close(descriptor)
            raise OSError(error.errno, f"the file system has no locks ({error.strerror})", lock) from error
        return descriptor

    def give_back(self, descriptor: int) -> None:
        """Release the lock and close its descriptor; the store is unlocked even if a forked process has a
        copy of it.
        """
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def shares_blocks(self, stripe: int) -> bool:
        """Return whether the files of a stripe can share blocks, found by a trial on the first call and remembered."""
        if stripe not in self._sharing:
            self._sharing[stripe] = shares_blocks(self.paths[stripe])
        return self._sharing[stripe]

    def data_name(self, generation: int, stripe: int) -> str:
        """Return the file name of a stripe of a generation."""
        return f"{self.prefix}.g{generation:06d}.s{stripe}.extents"

    def data_path(self, generation: int, stripe: int) -> str:
        """Return the path of the file of a stripe of a generation."""
        return os.path.join(self.paths[stripe], self.data_name(generation, stripe))

    def index_path(self, generation: int) -> str:
        """Return the path of a generation's index, which exists once the generation is sealed."""
        return os.path.join(self.paths[0], f"{self.prefix}.g{generation:06d}.index")

    def indexes(self) -> list[int]:
        """Return the numbers of the sealed generations in the folders, ascending."""
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.index")
        found = (pattern.fullmatch(name) for name in os.listdir(self.paths[0]))
        return sorted(int(match.group(1)) for match in found if match)

    def remove_unsealed(self) -> None:
        """Delete the files of generations without an index, which a killed process was writing."""
        sealed = set(self.indexes())
        pattern = re.compile(re.escape(self.prefix) + r"\.g(\d+)\.(?:s\d+\.extents|index\.part)")
        for path in self.paths:
            for name in os.listdir(path):
                match = pattern.fullmatch(name)
                if match and int(match.group(1)) not in sealed:
                    os.unlink(os.path.join(path, name))


class GenerationFiles:
    """Open files of one generation of the store in `folders`, by stripe, opened by `engine`; a stripe without data has
    no file. New files are writable; after `open_sealed` or `reopen_sealed` files are opened for reading.
    """

    def __init__(self, engine: Engine, folders: StoreFolders, generation: int) -> None:
        self._engine = engine
        self._folders = folders
        self.generation = generation
        self._files: dict[int, File] = {}
        self._writable = True

    @property
    def stripes(self) -> list[int]:
        """Return the stripes that have a file, ascending."""
        return sorted(self._files)

    @property
    def nbytes(self) -> int:
        """Return the current bytes of all files together."""
        return sum(file.size for file in self._files.values())

    def path(self, stripe: int) -> str:
        """Return the path of a stripe's file, which need not exist."""
        return self._folders.data_path(self.generation, stripe)

    def file(self, stripe: int) -> File:
        """Return the open file of a stripe; on first use it is created, or opened for reading if the generation is
        sealed.
        """
        if stripe not in self._files:
            self._files[stripe] = self._engine.open(self.path(stripe), "rw" if self._writable else "r")
        return self._files[stripe]

    def open_sealed(self, stripes: Sequence[int]) -> None:
        """Open the files of these stripes, which exist, for reading; later ones are opened for reading too."""
        self._writable = False
        for stripe in stripes:
            self.file(stripe)

    def end(self, ends: Sequence[int], headers: dict[int, bytes]) -> None:
        """Write the headers (by stripe) to the start of the files, truncate each file to its entry in `ends` (bytes, by
        stripe) and remove its write permission. The open files stay writable.
        """
        for stripe, file in self._files.items():
            if stripe in headers:
                self._engine.write(file, headers[stripe], 0).wait()
            os.truncate(self.path(stripe), ends[stripe])
            os.chmod(self.path(stripe), 0o444)

    @property
    def opened(self) -> dict[int, File]:
        """Return the open files by stripe."""
        return dict(self._files)

    def reopen_sealed(self) -> None:
        """Replace the files by ones opened for reading; the writable ones stay open, and their holder closes them."""
        written, self._files = self._files, {}
        self.open_sealed(sorted(written))

    def close(self) -> None:
        """Wait for the files' requests and close them; `file` opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def remove(self) -> None:
        """Close and delete the files and the index; hard links elsewhere keep their content."""
        paths = [self.path(stripe) for stripe in self._files]
        self.close()
        index = self._folders.index_path(self.generation)
        # Without its index a generation does not exist, so the index goes first.
        for path in [index, *paths]:
            if os.path.exists(path):
                os.unlink(path)
