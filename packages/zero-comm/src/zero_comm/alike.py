"""Messages and collectives in a world in which only one rank exists: torch's fake process group.

[Note: a fake world] `torch.distributed.init_process_group("fake", …)` gives one process the rank of its choice in a
world of any size; its collectives send nothing. In such a world our groups are fake too, and every other rank is taken
to send the same messages as this one. The ledger counts as in a real world, and buffers take the same memory; the work
does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .control import Control
from .group import Group
from .ledger import Ledger
from .message import Message
from .slices import TreeSum
from .tag import Tag
from .topology import Topology


def in_fake_world() -> bool:
    """Return whether torch.distributed's backend is `fake`: this process is the only rank that exists."""
    return bool(dist.get_backend() == "fake")


class AlikeStore(Store):
    """A torch `Store` for a world in which every rank does what this one does; each
    addition counts ``world_size`` times."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._counts: dict[str, int] = {}
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` once per rank to a counter, and return its new value."""
        self._counts[key] = self._counts.get(key, 0) + amount * self._world_size
        return self._counts[key]

    def set(self, key: str, value: bytes | str) -> None:
        """Keep ``value`` under ``key``, in place of any earlier one."""
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set the value to ``desired`` if it is ``expected`` (empty: if there is no value); return the value
        afterwards, or ``expected`` if there is none.
        """
        before = expected if isinstance(expected, bytes) else expected.encode()
        if self._values.get(key, b"") == before:
            self.set(key, desired)
        return self._values.get(key, before)

    def get(self, key: str) -> bytes:
        """Return a value. Raises KeyError if there is none."""
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # the name by which torch calls it from C++


class AlikeControl(Control):
    """`Control` in a fake world: every other rank answers with this rank's own message.

    ``nodes``: name of each rank's node, which `exchange_nodes` makes the topology. ``process_group``, ``ledger``: as
    for `Control`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, *, ledger: Ledger | None = None, nodes: Sequence[str] = ()
    ) -> None:
        super().__init__(process_group, ledger=ledger)
        self._nodes = tuple(nodes)

    def exchange_nodes(self, node: str) -> None:
        """Set the topology to the nodes that the constructor got, whatever ``node`` is."""
        super().exchange_nodes(node)
        self.topology = Topology(self._nodes)

    def watch(self, sever: Callable[[], object], stopped_after: float) -> None:
        """Start nothing: no rank ever waits for another here."""

    def _exchange(self, message: Message, deadline: float | None = None) -> list[Message]:
        """Return this rank's own message ``world_size`` times; ``deadline`` is ignored."""
        return super()._exchange(message, deadline) * self.world_size

    def _all_gather(self, body: bytes, tag: Tag, doing: Message, deadline: float | None) -> list[bytes]:
        """Return one body, which `_exchange` takes for those of all ranks; count the bytes as in a real world."""
        self._count(tag, len(body))
        return [body]


class AlikeGroup(Group):
    """`Group` in a fake world: a collective takes its buffers and sends nothing.

    On an accelerator the fake backend has collectives of its own, as real ones have, and slices are summed in full.
    """

    def coded_ranks(self, device: torch.device) -> Sequence[int]:
        """Return, on the CPU, this rank and another if there is one, whose slices stand for those of all ranks;
        elsewhere all ranks.
        """
        if device.type != "cpu":
            return super().coded_ranks(device)
        return sorted({self.rank, (self.rank + 1) % self.world_size})

    def _slices(self, flat: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the tensor itself ``count`` times instead of its slices, as on the CPU they are neither sent nor
        received."""
        if not self._uses_direct_messages(flat):
            return super()._slices(flat, count)
        return [flat] * count  # they are neither sent nor received

    def _exchange(
        self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], tag: Tag
    ) -> list[tuple[Any, int | None]]:
        """Count the exchange as issued, send nothing, and return an empty list: there is no operation to wait for."""
        self.issued += 1
        return []

    def _sum(self, slices: Sequence[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
        """Sum two slices of this rank's own instead of one of each rank, on the CPU; for a `TreeSum` as many as there
        are ranks, because that takes memory for its sums."""
        if not self._uses_direct_messages(out):
            super()._sum(slices, out, accumulate)
            return
        own = slices[self.rank]
        one = own if own.numel() == out.numel() else own.view(-1)[: out.numel()]
        count = len(slices) if isinstance(self._slice_sum, TreeSum) else 2
        super()._sum([one] * count, out, accumulate)
