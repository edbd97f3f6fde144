"""Measure memory: model state by unit, kind and tier, and the totals of device and process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import psutil
import torch

from zero_ckpt.torch.state_kinds import by_kind
from zero_partition import DeviceResidency, storage_address

from ..compat import max_memory_allocated, memory_allocated
from ..text import mebibytes, table

if TYPE_CHECKING:
    from zero_partition import Partition, ShardedOptimizer, Unit

MEMORY_KINDS = (
    "gathered parameters",
    "parameter shards",
    "secondary shards",
    "masters",
    "gradients",
    "placeholders",
    "optimizer states",
)
TIERS = ("device", "host", "nvme")


class MemoryRow(NamedTuple):
    """Bytes of one kind of model state that this rank holds for one unit on one tier."""

    unit: str
    kind: str
    tier: str
    nbytes: int


@runtime_checkable
class OnDisk(Protocol):
    """A store that keeps parameter shards in files."""

    @property
    def stored_bytes(self) -> int:
        """Return the number of bytes in the files."""


def memory_rows(partition: Partition, sharded: ShardedOptimizer | None) -> list[MemoryRow]:
    """Return the model state that this rank holds now, as rows. A storage counts once, under the first kind that uses
    it. Stores and tiers that count all units together have a row with a name in parentheses instead of a unit's."""
    counter = _StorageCounter(partition.device)
    rows: list[MemoryRow] = []
    for unit in partition.units:
        gradients = partition.runtime.gradients.get(unit.index)
        rows += counter.rows(unit.name, "gathered parameters", [unit.flat])
        rows += _shard_rows(partition, unit, counter)
        secondary = unit.route.secondary_shard
        rows += counter.rows(unit.name, "secondary shards", [] if secondary is None else [secondary])
        rows += counter.rows(unit.name, "masters", [] if unit.master is None else [unit.master])
        rows += counter.rows(unit.name, "gradients", [] if gradients is None else gradients.tensors())
        placeholders = [values for one in unit.placeholders for values in one.tensors()]
        rows += counter.rows(unit.name, "placeholders", placeholders)
    rows += counter.rows("(arriving weights)", "placeholders", partition.arrivals.blanks())
    if isinstance(partition.residency, OnDisk):
        rows.append(MemoryRow("(the store)", "parameter shards", "host", partition.residency.resident_bytes))
    return [*rows, *_tier_rows(partition), *_state_rows(sharded, counter)]


def memory_table(rows: Iterable[MemoryRow]) -> str:
    """Return ``rows`` as a table in MiB: a line per unit and tier, then one per tier for all; a column per kind."""
    cells: dict[tuple[str, str], dict[str, int]] = {}
    for unit, kind, tier, nbytes in rows:
        for key in ((unit, tier), ("all units", tier)):
            line = cells.setdefault(key, {})
            line[kind] = line.get(kind, 0) + nbytes
    cells |= {key: cells.pop(key) for key in list(cells) if key[0] == "all units"}  # as the last lines
    return table(
        ("MiB by unit", "tier", *MEMORY_KINDS),
        [
            (unit, tier, *(mebibytes(line.get(kind, 0)) for kind in MEMORY_KINDS))
            for (unit, tier), line in cells.items()
        ],
    )


def present_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated now: "process" (resident) and, on an accelerator, "device" and "device peak"."""
    found = {}
    if device.type != "cpu":
        found["device"] = memory_allocated(device)
        found["device peak"] = max_memory_allocated(device)
    found["process"] = psutil.Process().memory_info().rss
    return found


class _StorageCounter:
    """Makes rows of tensors and counts each storage once. ``device``: where the model computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[int] = set()

    def rows(self, unit: str, kind: str, tensors: Iterable[torch.Tensor]) -> Iterator[MemoryRow]:
        """Yield a row for each tier: the bytes there of the storages of ``tensors`` that were not counted before."""
        by_tier: dict[str, int] = {}
        for tensor in tensors:
            nbytes, address = tensor.untyped_storage().nbytes(), storage_address(tensor)
            if nbytes and address not in self._seen:
                self._seen.add(address)
                tier = "device" if tensor.device.type == self._device.type else "host"
                by_tier[tier] = by_tier.get(tier, 0) + nbytes
        for tier, nbytes in by_tier.items():
            yield MemoryRow(unit, kind, tier, nbytes)


def _shard_rows(partition: Partition, unit: Unit, counter: _StorageCounter) -> Iterator[MemoryRow]:
    """Yield the row of a unit's parameter shard. Shards in a store are not read for that."""
    store = partition.residency
    if isinstance(store, DeviceResidency):
        yield from counter.rows(unit.name, "parameter shards", [store.acquire(unit.name)])
    else:
        tier = "nvme" if isinstance(store, OnDisk) else "host"
        yield MemoryRow(unit.name, "parameter shards", tier, unit.layout.shard_numel * unit.plan.dtype.itemsize)


def _tier_rows(partition: Partition) -> Iterator[MemoryRow]:
    """Yield the rows of gradients and optimizer states on a tier, which counts all units together."""
    if partition.states is not None:
        for name, nbytes in partition.states.memory().items():
            kind = "gradients" if name == "gradients" else "optimizer states"
            yield MemoryRow("(offloaded)", kind, "nvme" if name == "nvme" else "host", nbytes)


def _state_rows(sharded: ShardedOptimizer | None, counter: _StorageCounter) -> Iterator[MemoryRow]:
    """Yield the rows of the optimizer states on no tier, by unit; nothing without an optimizer."""
    if sharded is None:
        return
    tensors: dict[str, list[torch.Tensor]] = {}
    for owned in sharded.fragments:
        values = by_kind(sharded.state_of(owned)).values()
        tensors.setdefault(owned.unit.name, []).extend(v for v in values if isinstance(v, torch.Tensor))
    for unit, states in tensors.items():
        yield from counter.rows(unit, "optimizer states", states)
