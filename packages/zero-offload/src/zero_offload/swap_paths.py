"""The folders of a store, how the bytes are shared between them, and what they are called in messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ._extents import measured_rates
from .budget import HostBudget
from .ends import current_ends

__all__ = ["NvmePath", "PathList", "SwapPaths", "need_disk", "swap_paths"]


@runtime_checkable
class PathList(Protocol):
    """The folders of a store as a configuration gives them: ``weights`` in whose proportion they get bytes (None: as
    their speed is measured), and ``key``, the setting that names them.
    """

    @property
    def folders(self) -> Sequence[str]: ...
    @property
    def weights(self) -> Sequence[float] | None: ...
    @property
    def key(self) -> str: ...


NvmePath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathList


@dataclass(frozen=True)
class SwapPaths:
    """The ``folders`` of a store: one, or several that get bytes in proportion to their ``weights``; None: in
    proportion to the speed of reading and writing at once, measured in each. ``key``: the setting that names them.
    """

    folders: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    key: str = "path"

    @property
    def names(self) -> list[str]:
        """Return what each folder is called in messages: its setting and its path."""
        if len(self.folders) == 1:
            return [f"'{self.folders[0]}' ({self.key})"]
        return [f"'{folder}' ({self.key}[{number}])" for number, folder in enumerate(self.folders)]

    @property
    def is_measured(self) -> bool:
        """Return whether the shares follow the measured speed of the folders: there are several, they have no weights,
        and this is no dry run, in which all shares are equal.
        """
        return self.weights is None and len(self.folders) > 1 and current_ends() is None

    def shares(self) -> list[float]:
        """Return the share of the bytes that each folder gets at the start, from 0 to 1. If there are no weights the
        folders are measured, unless that was done in the last ten minutes on this host; OffloadError for a folder that
        cannot be used.
        """
        measured = measured_rates(self.folders) if self.is_measured else [1.0] * len(self.folders)
        weights = self.weights or measured
        return [weight / sum(weights) for weight in weights]

    def described(self) -> str:
        """Return a line, for people, with each folder, its share of the bytes and its measured speed. Measures as
        `shares` does, with its errors.
        """
        shares = zip(self.folders, self.shares(), strict=True)
        told = [f"{share:.0%} of the bytes to '{folder}'" for folder, share in shares]
        if self.is_measured:
            rates = measured_rates(self.folders)
            told = [f"{text} ({rate / 1e9:.2f} GB/s)" for text, rate in zip(told, rates, strict=True)]
        return f"{self.key}: {', '.join(told)}"


def swap_paths(path: NvmePath) -> SwapPaths:
    """Return the folders of a store as `SwapPaths`; ``path`` is one path, several, or a `PathList`. ValueError if there
    is no path or one is empty, and unless weights are one positive number for each.
    """
    if isinstance(path, PathList):
        weights = None if path.weights is None else tuple(path.weights)
        found = SwapPaths(tuple(path.folders), weights, path.key)
    else:
        given = [path] if isinstance(path, (str, os.PathLike)) else path
        found = SwapPaths(tuple(os.fspath(folder) for folder in given))
    if not found.folders or not all(found.folders):
        raise ValueError(f"path: expected one folder or several, got {path!r}")
    weights = found.weights
    if weights is not None and (len(weights) != len(found.folders) or not all(0 < w < float("inf") for w in weights)):
        raise ValueError(f"path: expected a positive weight for each of {len(found.folders)} folders, got {weights}")
    return found


def need_disk(budget: HostBudget, purpose: str, nbytes: int, path: NvmePath) -> None:
    """Add to ``budget`` a need for ``nbytes`` in the folders of ``path``, of each folder for its share, rounded up;
    ``purpose`` names the need in messages. Do nothing for 0 bytes. ValueError for an invalid path, OffloadError for a
    folder whose speed cannot be measured.
    """
    if nbytes:
        paths = swap_paths(path)
        for folder, share in zip(paths.folders, paths.shares(), strict=True):
            budget.need(purpose, -int(-nbytes * share // 1), "disk", path=folder)
