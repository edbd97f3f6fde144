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
    """A torch `Store` in this process alone, for a world in which every rank does what this one does: what this rank
    adds to a counter counts once for each of ``world_size`` ranks."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._counts: dict[str, int] = {}
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        """Add ``amount``, once per rank, to the counter ``key`` (0 before the first addition), and return its new
        value. Counters are kept apart from the values of `set`."""
        self._counts[key] = self._counts.get(key, 0) + amount * self._world_size
        return self._counts[key]

    def set(self, key: str, value: bytes | str) -> None:
        """Store ``value`` under ``key``, in place of any earlier one."""
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set the value of ``key`` to ``desired`` if it is ``expected``, or if ``expected`` is empty and there is no
        value. Return the value afterwards; ``expected`` if there is none."""
        before = expected if isinstance(expected, bytes) else expected.encode()
        if self._values.get(key, b"") == before:
            self.set(key, desired)
        return self._values.get(key, before)

    def get(self, key: str) -> bytes:
        """Return the value of ``key``. Raises KeyError if there is none."""
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` have a value. A counter of `add` is no value."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete the value of ``key``; return whether there was one."""
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
        """Start no thread, unlike `Control.watch`: no rank ever waits for another here, so both arguments are
        ignored."""

    def _exchange(self, message: Message, deadline: float | None = None) -> list[Message]:
        """Return ``message``, with the fields that `Control` fills in, once for each of ``world_size`` ranks. Nothing
        is waited for, so ``deadline`` has no effect."""
        return super()._exchange(message, deadline) * self.world_size

    def _all_gather(self, body: bytes, tag: Tag, doing: Message, deadline: float | None) -> list[bytes]:
        """Return a list of this rank's ``body`` alone, which `_exchange` repeats for the other ranks. Count its bytes
        under ``tag`` as in a real world. ``doing`` and ``deadline`` are ignored."""
        self._count(tag, len(body))
        return [body]


class AlikeGroup(Group):
    """`Group` in a fake world: a collective takes its buffers and sends nothing.

    On an accelerator the fake backend has collectives of its own, as real ones have, and slices are summed in full.
    """

    def coded_ranks(self, device: torch.device) -> Sequence[int]:
        """Return the ranks whose slices on ``device`` a collective with a `Codec` encodes and decodes: on the CPU this
        rank and the next (if there is one), whose slices stand for those of all ranks; on an accelerator all ranks."""
        if device.type != "cpu":
            return super().coded_ranks(device)
        return sorted({self.rank, (self.rank + 1) % self.world_size})

    def _slices(self, flat: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return ``count`` times ``flat`` itself if it is on the CPU, where slices are neither sent nor received; else
        its ``count`` slices, as `Group` does."""
        if not self._uses_direct_messages(flat):
            return super()._slices(flat, count)
        return [flat] * count  # they are neither sent nor received

    def _exchange(
        self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], tag: Tag
    ) -> list[tuple[Any, int | None]]:
        """Count one collective in ``issued`` and return an empty list: nothing is sent or received, so there is no
        operation to wait for. All arguments are ignored."""
        self.issued += 1
        return []

    def _sum(self, slices: Sequence[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
        """Write to ``out``, or with ``accumulate`` add there, what stands for the average of ``slices``. On the CPU
        only this rank's own slice is summed, twice instead of once per rank (as often as there are ranks for a
        `TreeSum`, whose memory depends on it), so the numbers mean nothing."""
        if not self._uses_direct_messages(out):
            super()._sum(slices, out, accumulate)
            return
        own = slices[self.rank]
        one = own if own.numel() == out.numel() else own.view(-1)[: out.numel()]
        count = len(slices) if isinstance(self._slice_sum, TreeSum) else 2
        super()._sum([one] * count, out, accumulate)
