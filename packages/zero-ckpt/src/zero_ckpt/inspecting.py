"""Describe a checkpoint, as data and as text: one of this package, or, as a `Source`, one of another format.

A tensor is stored under a name and a kind: `param`, `buffer`, `master` or an optimizer state such as `exp_avg`. Aliases
are the names of tied tensors, each with the name under which the tensor is stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .locating import open_spec
from .manifest import TensorEntry
from .reader import Checkpoint

if TYPE_CHECKING:
    from .conversion.sources import Source

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def inspect(spec: str | os.PathLike[str]) -> dict[str, Any]:
    """Return, as a dict, names, kinds, shapes, dtypes and sizes in bytes of a checkpoint's tensors, and the rest of its
    manifest.

    `spec` is a root, `root@tag` or `root@step`, or a checkpoint directory. Only the manifest is read. Rank state is
    left out. Raises NotFoundError or DamagedError.
    """
    return describe(open_spec(os.fspath(spec)))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `inspect` returns, a dict of plain data, for an open checkpoint. Reads no tensor."""
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


def describe_source(source: Source) -> dict[str, Any]:
    """Return what is known of a checkpoint of another format, as a dict of plain data: its tensors and aliases, in the
    form of `describe`."""
    return {
        "tensors": [
            {
                "name": item.name,
                "kind": item.kind,
                "shape": list(item.shape),
                "dtype": item.dtype,
                "nbytes": item.nbytes,
            }
            for item in _source_tensors(source)
        ],
        "aliases": dict(source.aliases),
    }


def source_text(spec: str, source: Source) -> Iterator[str]:
    """Yield the lines that `zero-ckpt inspect` prints for a checkpoint of another format; `spec` is the name that the
    user gave it."""
    tensors = _source_tensors(source)
    yield f"{spec}: {len(tensors)} tensors, {size_text(sum(tensor.nbytes for tensor in tensors))}"
    yield from _tree(tensors, source.aliases)


def _source_tensors(source: Source) -> list[TensorEntry]:
    """Return the tensors of a checkpoint of another format as entries without slices."""
    return [TensorEntry(name, kind, item.shape, item.dtype, ()) for (name, kind), item in source.tensors.items()]


def tree_text(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the lines that `zero-ckpt inspect` prints for a checkpoint: a headline, a tree of names, tied names, then
    the bytes of each kind."""
    tensors = list(checkpoint.tensors.values())
    yield (
        f"{checkpoint.path}: step {checkpoint.step}, {len(tensors)} tensors, "
        f"{size_text(sum(tensor.nbytes for tensor in tensors))}, files: {len(checkpoint.manifest.files)}, "
        f"written by {checkpoint.world_size} rank{'s' if checkpoint.world_size != 1 else ''}"
    )
    yield from _tree(tensors, checkpoint.aliases)


def _tree(tensors: Sequence[TensorEntry], aliases: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a tree of tensor names in natural order, then tied names, then a line with the bytes of each
    kind.
    """
    by_name: dict[str, list[TensorEntry]] = {}
    for tensor in sorted(tensors, key=lambda tensor: natural_key(tensor.name)):
        by_name.setdefault(tensor.name, []).append(tensor)
    previous: list[str] = []
    for name, group in by_name.items():
        *parents, leaf = name.split(".")
        for depth, part in enumerate(parents):
            if previous[: depth + 1] != parents[: depth + 1]:
                yield f"{'  ' * (depth + 1)}{part}"
        previous = parents
        yield f"{'  ' * (len(parents) + 1)}{leaf}  {_entry_text(group)}"
    for alias, name in aliases.items():
        yield f"  {alias} = {name}"
    by_kind: dict[str, int] = {}
    for tensor in tensors:
        by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.nbytes
    yield "  by kind: " + ", ".join(f"{kind} {size_text(nbytes)}" for kind, nbytes in by_kind.items())


def natural_key(name: str) -> list[tuple[int, int, str, str]]:
    """Return a key to sort dotted names by, under which `blocks.2` comes before `blocks.10`."""
    return [_part_key(part) for part in name.split(".")]


def _part_key(part: str) -> tuple[int, int, str, str]:
    """Return the sort key of `part`, the text between two dots of a name. Numbers compare by length and digits, as
    Python does not convert very long ones."""
    if not part.isdecimal():
        return 1, 0, part, ""
    digits = part.lstrip("0")
    return 0, len(digits), digits, part


def _entry_text(tensors: list[TensorEntry]) -> str:
    """Return the shape, kinds, dtypes and total size of `tensors` as text; they all have one name, as a parameter and
    its optimizer state have."""
    first = tensors[0]
    kinds = ", ".join(
        f"{item.kind} {item.dtype}" + ("" if item.shape == first.shape else f" {list(item.shape)}") for item in tensors
    )
    return f"{list(first.shape)}  {kinds}  {size_text(sum(tensor.nbytes for tensor in tensors))}"
