"""The part of a checkpoint that one rank saves, and its form for another process of the dry run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zero_ckpt.manifest import FileEntry, Manifest, Slice, TensorEntry
from zero_ckpt.plain import pack, unpack
from zero_partition import Layout, LayoutEntry, UnitLayout


@dataclass(frozen=True)
class SavedPart:
    """The part of a checkpoint that one rank saves.

    ``manifest``: has the rank's slices only. ``layout``: of its run, in which the rank holds shard number ``shard`` of
    ``shards``, and the states of shards ``owned``. The first ranks, one per shard, write for all.
    """

    manifest: Manifest
    layout: Layout
    shard: int
    shards: int
    owned: range

    def encode(self) -> bytes:
        """Return the part as bytes, for `decode_part`."""
        place = {"shard": self.shard, "shards": self.shards, "owned": [self.owned.start, self.owned.stop]}
        return pack({**place, "manifest": encode_manifest(self.manifest), "layout": asdict(self.layout)})


def decode_part(data: bytes) -> SavedPart:
    """Return the part that `SavedPart.encode` returned as bytes."""
    found = unpack(data)
    units = tuple(
        UnitLayout(
            unit["name"],
            tuple(LayoutEntry(entry["name"], tuple(entry["shape"]), entry["offset"]) for entry in unit["entries"]),
            unit["world_size"],
            unit["shard_numel"],
        )
        for unit in found["layout"]["units"]
    )
    manifest = decode_manifest(found["manifest"])
    return SavedPart(manifest, Layout(units), found["shard"], found["shards"], range(*found["owned"]))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return ``manifest`` as bytes, for `decode_manifest`. Unlike `Manifest.encode` it accepts one that lacks
    slices.
    """
    frozen = None if manifest.frozen is None else sorted(manifest.frozen)
    return pack({**asdict(manifest), "frozen": frozen})


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest that `encode_manifest` returned as bytes."""
    found = unpack(data)
    return Manifest(
        **{
            **found,
            "files": tuple(map(_file_entry, found["files"])),
            "tensors": tuple(map(_tensor_entry, found["tensors"])),
            "rank_state": tuple(found["rank_state"]),
            "frozen": None if found["frozen"] is None else frozenset(found["frozen"]),
        }
    )


def _file_entry(data: dict[str, Any]) -> FileEntry:
    """Return the `FileEntry` that ``data``, a dict from `encode_manifest`, describes."""
    extents = None if data["extents"] is None else tuple((nbytes, digest) for nbytes, digest in data["extents"])
    return FileEntry(**{**data, "extents": extents})


def _tensor_entry(data: dict[str, Any]) -> TensorEntry:
    """Return the `TensorEntry` that ``data``, a dict from `encode_manifest`, describes."""
    slices = tuple(Slice(**piece) for piece in data["slices"])
    return TensorEntry(**{**data, "shape": tuple(data["shape"]), "slices": slices})
