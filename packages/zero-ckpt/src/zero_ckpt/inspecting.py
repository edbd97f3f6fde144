"""Describe a checkpoint, as data and as text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from .locating import open_spec
from .manifest import TensorEntry
from .reader import Checkpoint

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def inspect(spec: str | os.PathLike[str]) -> dict[str, Any]:
    """Return, as a dict, names, kinds, shapes, dtypes and sizes in bytes of a checkpoint's tensors, and the rest of its
    manifest.

    `spec` is a root, `root@tag` or `root@step`, or a checkpoint directory. Only the manifest is read. Rank state is
    left out. Raises NotFoundError or DamagedError.
    """
    return describe(open_spec(os.fspath(spec)))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `inspect` returns, for an open checkpoint."""
    return {
        "path": str(checkpoint.path),
        "tag": checkpoint.tag,
        "step": checkpoint.step,
        "world_size": checkpoint.world_size,
        "skipped": [list(item) for item in checkpoint.report.skipped],
        "files": [{"path": entry.path, "nbytes": entry.nbytes} for entry in checkpoint.manifest.files],
        "tensors": [
            {
                "name": tensor.name,
                "kind": tensor.kind,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "nbytes": tensor.nbytes,
                "slices": len(tensor.slices),
            }
            for tensor in checkpoint.tensors.values()
        ],
        "aliases": dict(checkpoint.aliases),
        "client_state": checkpoint.client_state,
        "config": checkpoint.config,
    }


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text with a unit of 1024's powers, such as `1.5 GiB`."""
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.1f} {_UNITS[power]}" if power else f"{nbytes:.0f} B"


def tree_text(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the lines of `zero-ckpt inspect`: a headline, a tree of names, tied names, then bytes by kind."""
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    yield (
        f"{checkpoint.path}: step {checkpoint.step}, {len(checkpoint.tensors)} tensors, {size_text(total)}, "
        f"{len(checkpoint.manifest.files)} files, written by {checkpoint.world_size} ranks"
    )
    by_name: dict[str, list[TensorEntry]] = {}
    for tensor in checkpoint.tensors.values():
        by_name.setdefault(tensor.name, []).append(tensor)
    previous: list[str] = []
    for name, tensors in by_name.items():
        *parents, leaf = name.split(".")
        for depth, part in enumerate(parents):
            if previous[: depth + 1] != parents[: depth + 1]:
                yield f"{'  ' * (depth + 1)}{part}"
        previous = parents
        yield f"{'  ' * (len(parents) + 1)}{leaf}  {_entry_text(tensors)}"
    for alias, name in checkpoint.aliases.items():
        yield f"  {alias} = {name}"
    by_kind: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.nbytes
    yield "  by kind: " + ", ".join(f"{kind} {size_text(nbytes)}" for kind, nbytes in by_kind.items())


def _entry_text(tensors: list[TensorEntry]) -> str:
    """Return shape, kinds, dtypes and total size of the tensors of one name as text, such as a parameter and its
    optimizer state."""
    first = tensors[0]
    kinds = ", ".join(
        f"{item.kind} {item.dtype}" + ("" if item.shape == first.shape else f" {list(item.shape)}") for item in tensors
    )
    return f"{list(first.shape)}  {kinds}  {size_text(sum(tensor.nbytes for tensor in tensors))}"
